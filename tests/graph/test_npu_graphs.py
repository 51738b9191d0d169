"""Every step program of the full-size model as a graph-engine graph, by the real torchair: one layer of each kind.

Needs torch_npu (`pip install 'dsv4[npu]'`, no CANN and no device): elsewhere these tests say so and are skipped.
"""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch

from dsv4.config import ParallelConfig, StepShape, load_config
from dsv4.errors import CaptureError, PlatformError
from dsv4.ops import npu_schemas
from dsv4.profile.capture import Geometry, capture, prefix, world

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is None,
    reason="torch_npu is not installed: run `make test-npu` (a virtual environment with the npu extra)",
)

FLASH = load_config(Path(__file__).parents[2] / "configs" / "model" / "deepseek-v4-flash-dspark.json")
SMALL = prefix(FLASH, 1)
LAYOUTS = {"dp4-ep16-tp4": ParallelConfig(dp=4, tp=4, ep=16), "dp2-ep8-tp4": ParallelConfig(dp=2, tp=4, ep=8)}
DEMO_NODES = 773  # a layer without compressors, constants and mHC written naively


def geometry(k: int, context: int) -> Geometry:
    pages = {"history": 4 * context // 128, "window": 900, "tail": 300, "open": 900}
    widths = {"history": context // 128, "window": 80, "tail": 300, "open": 80}
    return Geometry(k=k, slots=16, pages=pages, widths=widths, positions=context + 8)


def lowered(kind: str, k: int, context: int = 8192, layout: str = "dp4-ep16-tp4", rank: int = 0, cfg=SMALL):
    from dsv4.graph import npu

    npu.load()
    query_len = {"prefill": 128, "decode": 1, "speculate": k + 1, "seed": k}[kind]
    rows = 8 if kind == "prefill" else 16
    with world(LAYOUTS[layout], rank) as mesh:
        traced = capture(
            cfg, mesh, StepShape(kind, rows, query_len, context // 128), geometry(k, context), device="npu:0"
        )
        return traced, npu.GeLowered(traced)


PROGRAMS = [("decode", 0), ("prefill", 0), ("speculate", 7), ("prefill", 7), ("seed", 7)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("context", [8192, 1048576])
@pytest.mark.parametrize(("kind", "k"), PROGRAMS)
def test_programs_lower_and_write_in_place(kind: str, k: int, context: int, layout: str) -> None:
    traced, low = lowered(kind, k, context, layout)
    assert not low.copied_pools()
    earlier: set[str] = set()
    for op in low.graph.op:  # simplified graphs stay whole and ordered
        assert {name.rpartition(":")[0] for name in op.input if name} <= earlier
        earlier.add(op.name)
    donated = {leaf.path for leaf in traced.args_info if leaf.donated}
    pools = {path for path in donated if path.startswith("cache.layers")}
    if kind == "seed":
        assert set(low.written_inputs) == {"state.drafts"}
        return
    assert set(low.written_inputs) <= donated
    assert pools <= set(low.written_inputs)
    assert {"state.anchor", "state.position", "state.limit"} <= set(low.written_inputs)
    assert all(-1 not in desc.shape.dim for op in low.graph.op if op.type == "Data" for desc in op.output_desc)


@pytest.mark.slow
def test_nodes_of_a_layer() -> None:
    """On average over the model far below half of the naive demo's, compressors and indexers included."""
    cfg = prefix(FLASH, 2)
    _, low = lowered("decode", 0, cfg=cfg)
    layers = Counter(node.scope[0] for node in low.nodes if node.scope and node.scope[0].startswith("layer"))
    last = {kind: layers[f"layer {i}"] for i, kind in enumerate(cfg.kinds)}
    total = sum(last[kind] for kind in FLASH.kinds)
    assert total / len(FLASH.kinds) <= 0.36 * DEMO_NODES
    assert low.histogram()["LogSoftmaxV2"] == 2 * 38 * len(cfg.kinds)  # Sinkhorn: one node a half-round


@pytest.mark.slow
def test_ranks_share_one_order_of_collectives_and_the_chain_has_none() -> None:
    orders = []
    for rank in (0, 5, 15):
        _, low = lowered("speculate", 7, rank=rank)
        orders.append([kind for kind, _, _ in low.collectives()])
        assert not [scope for _, _, scope in low.collectives() if "markov" in scope]
    assert orders[0] == orders[1] == orders[2]
    assert {"HcomAllReduce", "HcomAllGather", "MoeDistributeDispatchV2", "MoeDistributeCombineV2"} <= set(orders[0])


def test_schemas_are_those_of_torch_npu() -> None:
    from dsv4.graph import npu

    npu.load()
    found = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("npu::") and not s.overload_name]
    theirs = {s.name.removeprefix("npu::"): str(s) for s in found}
    for name, schema in npu_schemas.used().items():
        assert theirs[name] == str(torch._C.parse_schema(f"npu::{name}{schema}"))


def test_a_plugin_fills_its_slot_with_one_node() -> None:
    """What a package of custom operators does: an operator with a shape function, a converter, a function in a slot."""
    from dsv4.graph import npu
    from dsv4.graph.stages import StepProgram

    npu.load()
    import torchair

    from dsv4.ops.npu import npu_ops

    library = torch.library.Library("dsv4_test", "FRAGMENT")
    library.define("hc_post(Tensor streams, Tensor y, Tensor post, Tensor comb) -> Tensor")
    library.impl("hc_post", lambda streams, *_: torch.empty_like(streams), "Meta")
    operator = torch.ops.dsv4_test.hc_post.default

    @torchair.register_fx_node_ge_converter(operator)
    def convert(streams, y, post, comb, meta_outputs=None):
        inputs = {"streams": streams, "y": y, "post": post, "comb": comb}
        return torchair.ge.custom_op("HcPost", inputs=inputs, attrs={}, outputs=["out"])

    table = npu_ops(1, plugins={"hc_post": operator})
    shapes = ((16, 4, 4096), (16, 4096), (16, 4), (16, 4, 4))
    args = [torch.empty(shape, device="meta") for shape in shapes]
    program = StepProgram("plug", lambda a, b, c, d: table.hc_post(a, b, c, d), StepShape("decode", 16, 1, 1))
    low = npu.GeLowered(program.trace(*args, device="npu:0"))
    assert low.histogram() == Counter({"Data": 4, "HcPost": 1, "NetOutput": 1})
    library._destroy()


def test_an_operator_without_converter_is_named() -> None:
    from dsv4.graph import npu
    from dsv4.graph.stages import StepProgram

    npu.load()
    program = StepProgram("odd", lambda x: torch.special.bessel_j0(x), StepShape("decode", 4, 1, 1))
    traced = program.trace(torch.empty(4, device="meta"), device="npu:0")
    with pytest.raises(CaptureError, match="bessel_j0"):
        npu.GeLowered(traced)


def test_nothing_runs_under_the_shim() -> None:
    from dsv4.graph import npu
    from dsv4.graph.stages import StepProgram

    npu.load()
    program = StepProgram("twice", lambda x: x + x, StepShape("decode", 4, 1, 1))
    low = npu.GeLowered(program.trace(torch.empty(4, device="meta"), device="npu:0"))
    with pytest.raises(PlatformError, match=r"CANN is not set up.*--platform cpu"):
        low.build({})
