"""The real steps on the fused kernels: one native call a step, the same bits as running them operator by operator."""

import functools
import gc
import tracemalloc
from dataclasses import replace

import pytest
import torch

from dsv4.batch import RowBatch
from dsv4.config import StepShape
from dsv4.errors import PlatformError
from dsv4.graph import Arena, Compiled, StepProgram
from dsv4.graph.cpu import native_machine
from dsv4.ops.cpu import CPU, library
from dsv4.ops.cpu_params import prepare
from dsv4.params import Params
from dsv4.steps import STEPS
from dsv4.tree import named_leaves
from tests.support.models import memory_params, quantised, tiny_config, tiny_weights
from tests.support.runner import Runner

CFG = tiny_config()


@pytest.fixture(autouse=True)
def kernels():
    try:
        library()
    except PlatformError as error:
        pytest.skip(f"no CPU kernels here: {error}")


@functools.cache
def params(form: str) -> Params:
    weights = tiny_weights(CFG)
    return memory_params(CFG, weights, drafter=True) if form == "f32" else quantised(CFG, weights, drafter=True)


class TapeRunner(Runner):
    """A `Runner` whose steps are tapes over one arena."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.programs: dict[StepShape, Compiled] = {}
        self.arena = Arena()

    def _step(self, kind, rows, query_len, batch):
        shape = StepShape(kind, rows, query_len, self.pages)
        if shape not in self.programs:
            trees = {"params": self.params, "cache": self.cache, "state": self.state}
            program = StepProgram(kind, STEPS[kind](self.env, shape), shape, donated=("cache", "state"))
            machine = replace(native_machine(), parts=3)  # whole tapes run in every test of the engine
            lowered = program.trace(*trees.values(), batch).lower("cpu", machine=machine)
            self.programs[shape] = lowered.compile(bind=trees, arena=self.arena)
        out, cache, state = self.programs[shape](batch)
        self.cache, self.state = cache, state
        return out


def runners(form: str, k: int) -> tuple[Runner, TapeRunner]:
    return tuple(kind(CFG, params(form), ops=CPU, k=k, slots=3) for kind in (Runner, TapeRunner))


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("form", ["f32", "w8a8"])
def test_every_step_gives_the_same_bits_as_operator_by_operator(form: str, k: int):
    eager, tape = runners(form, k)
    generator = torch.Generator().manual_seed(k)
    ids = torch.randint(0, CFG.vocab_size, (300,), generator=generator).tolist()
    for slot, length in ((0, 300), (2, 37)):
        a, b = (runner.generate(slot, ids[:length], 24, chunks=(128,)) for runner in (eager, tape))
        assert a == b
    state, cache = (dict(named_leaves(tree)) for tree in (tape.state, tape.cache))
    for name, x in named_leaves(eager.state):
        assert torch.equal(x, state[name]), name
    for name, x in named_leaves(eager.cache):
        assert torch.equal(x[1:], cache[name][1:]), name  # row 0 takes what nobody reads, in any order


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("form", ["f32", "w8a8"])
def test_a_step_is_one_native_call_that_copies_no_pool(form: str, k: int):
    _, tape = runners(form, k)
    tape.generate(0, list(range(20)), 8)
    assert {shape.kind for shape in tape.programs} == ({"prefill", "speculate", "seed"} if k else {"prefill", "decode"})
    for compiled in tape.programs.values():
        lowered, traced = compiled.lowered, compiled.lowered.traced
        assert lowered.python_segments == 0
        assert len(lowered.tape.segments) == 1
        assert not [line for line in traced.reads_before_write() if line.startswith("cache")]
        assert not [line for line in traced.repeated_writes() if line.startswith("cache")]
        assert {leaf.path.split(".")[0] for leaf in compiled.args_info} == {"params", "cache", "state", "batch"}


def test_nothing_grows_and_nothing_moves_over_a_thousand_replays():
    _, tape = runners("w8a8", 4)
    tape.prefill(0, list(range(20)), max_tokens=10**6)
    tape.decode([0])
    run = tape.programs[StepShape("speculate", 1, 5, tape.pages)]
    batch = RowBatch(slots=torch.zeros(1, dtype=torch.int32))
    addresses = [x.data_ptr() for _, x in named_leaves((tape.cache, tape.state))]

    def replay_and_measure() -> int:
        for _ in range(500):
            run(batch)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    first, second = replay_and_measure(), replay_and_measure()
    tracemalloc.stop()
    assert second - first < 512
    assert [x.data_ptr() for _, x in named_leaves((tape.cache, tape.state))] == addresses
    assert tape.arena.buffer.nbytes == max(p.lowered.tape.arena_bytes for p in tape.programs.values())


def test_the_cost_table_knows_every_operator_that_multiplies():
    _, tape = runners("w8a8", 4)
    tape.generate(0, list(range(20)), 8)
    compiled = tape.programs[StepShape("speculate", 1, 5, tape.pages)]
    costs = compiled.lowered.cost()
    multiply = {name for name, (_, cost) in costs.items() if cost.flops}
    assert multiply == {
        f"dsv4.{name}" for name in ("linear", "linear_int8", "grouped_linear", "hc_pre", "hc_head", "attention", "index_topk",
                                    "route", "route_hash", "moe_int8", "markov")
    }  # fmt: skip
    pool = sum(x.nbytes for name, x in named_leaves(tape.cache) if name.endswith("kv"))
    assert costs["dsv4.attention"][1].read_bytes < pool, "attention reads the rows it names, not whole pools"
    linear = params("w8a8").target.layers[0].attn.w_in
    node = next(e.node for e in compiled.lowered.tape.entries if str(e.node.target) == "dsv4.linear.default")
    assert node.args[1].meta["val"].shape == linear.shape


@pytest.mark.parametrize("form", ["f32", "w8a8"])
def test_weights_in_panels_cost_what_plain_ones_do(form: str):
    costs = []
    for weights in (params(form), prepare(params(form))):
        tape = TapeRunner(CFG, weights, ops=CPU, k=0, slots=3)
        tape.generate(0, list(range(20)), 2)
        lowered = tape.programs[StepShape("decode", 1, 1, tape.pages)].lowered
        assert "moe" in lowered.as_text()
        costs.append({name: (count, cost.flops) for name, (count, cost) in lowered.cost().items()})
    assert costs[0] == costs[1]


def test_capture_is_fast_enough_to_happen_at_start_up():
    _, tape = runners("w8a8", 4)
    tape.generate(0, list(range(20)), 8)
    slowest = max(compiled.lowered.traced.seconds for compiled in tape.programs.values())
    assert slowest < 2.0, "tens of milliseconds on an idle core; seconds mean that capture has grown a hidden cost"
