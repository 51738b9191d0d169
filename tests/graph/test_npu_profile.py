"""The profile's figures against what is known otherwise, and the NPU side of programs on a host without torch_npu."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsv4.checkpoint.load import abstract_params, random_params
from dsv4.checkpoint.manifest import stored, weights
from dsv4.config import ParallelConfig, StepShape, load_config
from dsv4.errors import ConfigError, PlatformError
from dsv4.graph.npu_run import BoundStep, cache_key, why_no_npu
from dsv4.graph.stages import StepProgram
from dsv4.mesh import Mesh
from dsv4.ops.npu_params import prepare
from dsv4.ops.npu_slots import installed
from dsv4.profile.capture import Geometry, capture, prefix, world
from dsv4.profile.cost import Cost, live_rows, peak_workspace, program_cost, scaled
from dsv4.profile.devices import load_devices
from dsv4.profile.memory import plan_memory
from dsv4.profile.report import page, summary, trace
from dsv4.profile.roofline import Speculation, step_time
from dsv4.profile.run import copies, parameter_counts
from dsv4.tree import tree_bytes

CONFIG = Path(__file__).parents[2] / "configs" / "model" / "deepseek-v4-flash-dspark.json"
FLASH = load_config(CONFIG)
EP16 = ParallelConfig(dp=4, tp=4, ep=16)
GEOMETRY = Geometry(
    k=7, slots=16, pages={"history": 1100, "window": 900, "tail": 300, "open": 900},
    widths={"history": 64, "window": 80, "tail": 300, "open": 80}, positions=8200,
)  # fmt: skip


def test_parameters_are_the_published_ones() -> None:
    counts = parameter_counts(FLASH)
    assert (round(counts["target"] / 1e9), round(counts["active"] / 1e9)) == (284, 13)
    assert 19.7e9 < counts["drafter"] < 20e9


def test_weight_bytes_of_all_ranks_are_the_manifest() -> None:
    """Sharded tensors once, replicated ones as often as they are held; gates and the confidence head widen from bf16 to
    float32, ids shrink to int32."""
    params = abstract_params(FLASH, Mesh(dp=4, tp=4, ep=16), True, max_positions=8)
    rank = tree_bytes(params.target) + tree_bytes(params.drafter)
    expected = 0
    for weight in weights(FLASH):
        size = sum(spec.nbytes for spec in stored(weight, "w8a8"))
        name = weight.name.split(".", 2)[-1] if weight.name[0] in "lm" else weight.name
        if ".experts." in weight.name:
            size //= 16
        elif name in ("attn.wq_b.weight", "attn.attn_sink", "attn.wo_a.weight") or weight.name == "head.weight":
            size //= 4
        elif name == "attn.wo_b.weight":  # input columns are split, the scale of its rows is not
            size = math.prod(weight.shape) // 4 + 4 * weight.shape[0]
        elif name in ("ffn.gate.weight", "confidence_head.proj.weight"):
            size *= 2
        elif name.endswith("tid2eid"):
            size //= 2
        expected += size
    assert rank == expected


def test_prefix_keeps_the_models_own_layers() -> None:
    small = prefix(FLASH, 2)
    assert small.kinds == FLASH.kinds[:6] and small.num_hash_layers == 3 and small.num_stages == 3
    assert prefix(FLASH, 99).kinds == FLASH.kinds
    assert small.dspark_target_layer_ids == (3, 4, 5)


@pytest.fixture(scope="module")
def speculate():
    small = prefix(FLASH, 2)
    with world(EP16) as mesh:
        return small, capture(small, mesh, StepShape("speculate", 16, 8, 64), GEOMETRY)


def test_scaling_a_prefix_is_exact() -> None:
    shape, geometry = StepShape("decode", 4, 1, 64), replace(GEOMETRY, k=0)
    with world(EP16) as mesh:
        two, four = prefix(FLASH, 2), prefix(FLASH, 4)
        small = program_cost(capture(two, mesh, shape, geometry))
        large = program_cost(capture(four, mesh, shape, geometry)).total
    guess = scaled(small, two.kinds, four.kinds).total
    assert (guess.nodes, guess.flops, guess.collectives) == (large.nodes, large.flops, large.collectives)
    assert guess.bytes == large.bytes and guess.exchanged == large.exchanged


def test_costs_of_a_full_verify_step(speculate) -> None:
    small, traced = speculate
    cost = scaled(program_cost(traced), small.kinds, FLASH.kinds).total
    rank = abstract_params(FLASH, Mesh(dp=4, tp=4, ep=16), True, max_positions=8)
    read = tree_bytes(rank.target) + tree_bytes(rank.drafter) - tree_bytes(rank.target.embed)
    tables = sum(tree_bytes(layer.router.tid2eid) for layer in rank.target.layers[:3])
    assert abs(cost.bytes["weights"] / (read - tables) - 1) < 0.1  # each weight about once
    # Arithmetic of a token: two FLOPs for each parameter it uses. 128 tokens of a TP group, experts over 16 ranks.
    assert live_rows(traced) == 128 // 4 * 6
    assert traced.graph is not None and not traced.repeated_writes()
    assert not [line for line in traced.reads_before_write() if line.startswith("cache")]


@pytest.mark.parametrize(("kind", "rows", "query_len"), [("decode", 1, 1), ("decode", 16, 1), ("speculate", 16, 8)])
def test_what_a_step_moves_is_weights_cache_or_named(kind: str, rows: int, query_len: int) -> None:
    """One row moves little else; with more, the named movers of intermediates leave less than a tenth."""
    small, geometry = prefix(FLASH, 1), replace(GEOMETRY, k=query_len - 1)
    with world(EP16) as mesh:
        traced = capture(small, mesh, StepShape(kind, rows, query_len, 64), geometry)
    cost = scaled(program_cost(traced), small.kinds, FLASH.kinds)
    moved = cost.total.bytes
    explained = moved["weights"] + moved["cache"]
    if rows == 1:
        assert explained > 0.95 * moved.total()
    named = copies(cost)
    assert explained + sum(one["bytes"] for one in named) > 0.9 * moved.total()
    assert named == sorted(named, key=lambda one: -one["bytes"]) and len(named) < 32
    assert all(": " in one["where"] for one in named)


def test_collectives_are_the_same_on_every_rank() -> None:
    small, orders = prefix(FLASH, 1), []
    for rank in (0, 6, 15):
        with world(EP16, rank) as mesh:
            traced = capture(small, mesh, StepShape("speculate", 16, 8, 64), GEOMETRY)
        orders.append(
            [str(n.target) for n in traced.graph.nodes if "c10d" in str(n.target) or "distribute" in str(n.target)]
        )
    assert orders[0] == orders[1] == orders[2] and orders[0]


def test_times_and_break_even(speculate) -> None:
    _, traced = speculate
    device = load_devices()["A3"]
    times = step_time(program_cost(traced), device)
    assert 0 < times.roofline < times.total and set(times.by_part) >= {"attention", "experts", "mHC"}
    s = Speculation(requests=16, plain_s=0.04, speculate_s=0.06)
    assert s.break_even == pytest.approx(1.5)
    assert s.tokens_per_s(s.break_even) == pytest.approx(s.plain_tokens_per_s)
    assert peak_workspace(traced) > 0


def test_costs_add() -> None:
    total, one = Cost(), Cost(nodes=2, collectives=1, exchanged=10)
    one.flops["bf16"], one.bytes["weights"] = 100, 50
    total.add(one, 3)
    assert (total.nodes, total.flops["bf16"], total.moved, total.exchanged) == (6, 300, 150, 30)


def test_memory_limits() -> None:
    def plan(context: int, count: int) -> dict[str, int]:
        return {
            "history": 1 + count * -(-context // 128),
            "window": 1 + 9 * count,
            "tail": 1 + 4 * count,
            "open": 1 + 9 * count,
        }

    def at(available: int):
        return plan_memory(FLASH, Mesh(dp=4, tp=4, ep=16), plan, context=8192, requests=16, rows_limit=64, drafter=True,
                           workspace=10**9, available=available)  # fmt: skip

    roomy, tight = at(55 * 10**9), at(30 * 10**9)
    assert roomy.fits and roomy.largest_batch == (64, "64 rows per TP group")
    assert roomy.largest_context[0] > tight.largest_context[0] and tight.largest_context[1] == "device memory"
    assert roomy.total == sum(roomy.families.values())


def test_a_bound_step_is_the_captured_step() -> None:
    program = StepProgram("step", lambda params, x: (params["w"] * x, x), StepShape("decode", 3, 1, 1))
    w, x = torch.arange(3.0), torch.ones(3)
    traced = program.trace({"w": w}, x)
    (y,) = BoundStep(traced, {0: w}).step(x)
    assert torch.equal(y, w)
    assert cache_key(traced, 0) != cache_key(traced, 1)
    assert cache_key(traced, 0) == cache_key(program.trace({"w": w}, x), 0)


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    reason = why_no_npu()
    assert reason and "\n" not in reason and "--platform cpu" in reason
    program = StepProgram("twice", lambda x: x + x, StepShape("decode", 4, 1, 1))
    with pytest.raises(PlatformError, match="--platform cpu"):
        program.trace(torch.empty(4, device="meta")).lower("npugraph_ex").compile()


def test_slots_refuse_unknown_and_doubled_names() -> None:
    from importlib.metadata import EntryPoint

    def entry(name: str) -> EntryPoint:
        return EntryPoint(name, "math:sqrt", "dsv4.npu_ops")

    assert installed((entry("hc_pre"),))["hc_pre"] is math.sqrt
    with pytest.raises(ConfigError, match="no NPU slot is called 'linear'"):
        installed((entry("linear"),))
    with pytest.raises(ConfigError, match="filled by another package"):
        installed((entry("hc_pre"), entry("hc_pre")))


def test_prepare_keeps_logical_shapes() -> None:
    from tests.support.models import tiny_config

    params = random_params(tiny_config(quant_format="w8a8"), 1, max_positions=64)
    for plain, packed in zip(params.target.layers, prepare(params).target.layers, strict=True):
        assert plain.attn.w_in.shape == packed.attn.w_in.shape
        assert plain.attn.wo_a.shape == packed.attn.wo_a.shape
        assert plain.router.gate.shape == packed.router.gate.shape


def run(tmp_path: Path, *flags: str):
    import typer

    from cli.console import one_line_errors
    from cli.profile import profile

    app = typer.Typer()
    app.command()(one_line_errors(profile))
    return CliRunner().invoke(app, ["--model", str(CONFIG), "--out", str(tmp_path / "out"), *flags])


@pytest.mark.slow
def test_the_command_writes_its_files(tmp_path: Path) -> None:
    spec = '{"method":"dspark","num_speculative_tokens":7}'
    result = run(tmp_path, "--dp", "4", "--ep", "16", "--tp", "4", "--max-num-seqs", "8", "--speculative-config", spec,
                 "--layers", "1")  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert data["schema"] == 1 and {p["kind"] for p in data["programs"]} == {"prefill", "decode", "speculate", "seed"}
    html = (tmp_path / "out" / "report.html").read_text()
    assert html == page(data) and "break-even" in html and "http" not in html
    assert json.loads((tmp_path / "out" / "trace.json").read_text()) == json.loads(trace(data))
    lines = summary(data)
    assert any(line.startswith("K=7 pays") for line in lines)
    assert any("of its bytes are intermediates: " in line for line in lines)
    assert list((tmp_path / "out" / "programs").glob("*.txt"))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--dp", "3", "--ep", "12", "--tp", "4"), "--ep is 12, expected 8 or 16"),
        (("--dp", "4", "--ep", "16", "--tp", "4", "--profile-device", "B200"), "expected one of A3, A2"),
        (("--dp", "4", "--ep", "16", "--tp", "4", "--device-table", "nowhere.toml"), "no device table there"),
        (("--dp", "4", "--ep", "16", "--tp", "4", "--out", "/proc/none"), "not writable"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, flags: tuple[str, ...], text: str) -> None:
    result = run(tmp_path, *flags)
    assert result.exit_code == 1 and text in result.output
    assert len([line for line in result.output.splitlines() if line.startswith("error:")]) == 1
