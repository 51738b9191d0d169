"""The tape against eager execution, bit for bit: any graph, any views, any arena."""

import random
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.config import StepShape
from dsv4.errors import CaptureError
from dsv4.graph import Arena, StepProgram
from dsv4.graph.arena import ALIGNMENT, Block, place
from dsv4.tree import map_leaves
from tests.graph import toy

SHAPE = StepShape("decode", 4, 1, 1)


def program(fn, donated=("cache",)) -> StepProgram:
    return StepProgram("toy", fn, SHAPE, donated)


def same(a, b) -> None:
    for x, y in zip(toy_leaves(a), toy_leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x, y)


def toy_leaves(value) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(value)


def both_ways(fn, params, cache, batch, runs: int = 3):
    """Runs `fn` eagerly and as tapes, whole and split by rows, on equal memory, several times, and compares results and
    caches. Returns the whole one lowered."""
    traced = program(fn).trace(params, cache, batch)
    whole, split = (traced.lower("cpu", machine=machine) for machine in (toy.MACHINE, toy.SPLIT))
    mine, *theirs = (map_leaves(torch.clone, cache) for _ in range(3))
    tapes = [
        low.compile(bind={"params": params, "cache": pool}) for low, pool in zip((whole, split), theirs, strict=True)
    ]
    for _ in range(runs):
        batch = map_leaves(lambda x: torch.randn_like(x) if x.is_floating_point() else x, batch)
        expected = fn(params, mine, batch)
        for compiled, pool in zip(tapes, theirs, strict=True):
            same(expected, compiled(batch))
            same(mine, pool)
    return whole


def test_a_step_is_one_native_run():
    lowered = both_ways(toy.step, toy.weights(), toy.pools(), toy.inputs())
    assert lowered.python_segments == 0
    assert lowered.histogram() == {"toy.mix": 7, "toy.both": 2, "toy.put": 2}
    assert len(lowered.tape.segments) == 1


VIEWS = {
    "slice": lambda x: x[1:3],
    "columns": lambda x: x[:, 2:6],
    "stepped": lambda x: x[:, ::2],
    "select": lambda x: x[2],
    "negative": lambda x: x[-1],
    "split": lambda x: x.split([3, 5], 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind(0)[3],
    "view": lambda x: x.view(2, 16),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 4))[:, 1],
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "transpose": lambda x: x.transpose(0, 1)[2:],
    "permute": lambda x: x.view(4, 2, 4).permute(1, 0, 2)[1],
    "expand": lambda x: x[:1].expand(4, 8),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "reshape": lambda x: x.reshape(8, 4),
    "diagonal": lambda x: x.diagonal(),
    "alias": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_cost_nothing(name: str):
    view = VIEWS[name]

    def fn(params, cache, batch):
        x = toy.mix(batch.x, params.w)
        part = view(x)
        return toy.Outputs(y=toy.mix(part, view(params.b))), cache

    lowered = both_ways(fn, toy.weights(), toy.pools(), toy.inputs())
    assert lowered.python_segments == 0
    assert lowered.node_count == 2


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_every_kind_can_be_returned(name: str):
    view = VIEWS[name]

    def fn(params, cache, batch):
        return (view(toy.mix(batch.x, params.w)), view(params.b), view(batch.x)), cache

    both_ways(fn, toy.weights(), toy.pools(), toy.inputs())


def test_a_write_through_a_view_of_a_pool():
    def fn(params, cache, batch):
        pool = cache.layers[0]
        toy.put(pool.view(2, 8, 8)[1], batch.slots, batch.x)
        return toy.Outputs(y=toy.mix(pool[4:12], pool[8:])), cache

    batch = replace(toy.inputs(), slots=torch.tensor([5, 0, 7, 2], dtype=torch.int32))
    assert both_ways(fn, toy.weights(), toy.pools(1), batch).python_segments == 0


def test_rows_of_a_view_may_be_rows_of_others():
    """A split tape waits for all parts where row i of a view is not row i of what was written."""

    def fn(params, cache, batch):
        x = toy.mix(batch.x, params.w)
        across = toy.mix(x.transpose(0, 1), x)
        first = toy.mix(across[:1].expand(4, 4), across)
        shifted = toy.mix(first.flatten()[2:14].view(3, 4)[:, :3].contiguous(), params.b[:3, :3])
        return toy.Outputs(y=toy.mix(first, x)), cache if shifted is not None else None

    split = both_ways(fn, toy.weights(4, 4), toy.pools(width=4), toy.inputs(4, 4))
    assert split.python_segments <= 1


def test_calls_in_a_row_share_a_section():
    def fn(params, cache, batch):
        x = batch.x
        for _ in range(5):
            x = toy.mix(x, params.w)
        pool = toy.put(cache.layers[0], batch.slots, x)
        return toy.Outputs(y=toy.mix(pool[:4], x)), cache

    both_ways(fn, toy.weights(), toy.pools(1), toy.inputs())
    tape = program(fn).trace(toy.weights(), toy.pools(1), toy.inputs()).lower("cpu", machine=toy.SPLIT).tape
    assert tape.sections.tolist() == [[6, 3, 0], [1, 3, 18]]  # the pool is read as a whole only when all have written


def test_operators_without_a_kernel_run_in_python_and_are_counted():
    def fn(params, cache, batch):
        x = toy.mix(batch.x, params.w)
        a = torch.cat([x.relu(), x * 2], 0)  # three operators, one segment
        b = toy.mix(a[:4], a[4:])
        values, indices = b.sort(1)
        cache.layers[0].index_put_((batch.slots.long(),), values)
        return (values, indices, toy.mix(b, cache.layers[0][:4])), cache

    lowered = both_ways(fn, toy.weights(), toy.pools(), toy.inputs())
    assert lowered.python_segments == 2
    assert lowered.tape.eager_calls == 6
    assert "[python]" in lowered.as_text()


def test_constants_are_bound():
    table = torch.randn(4, 8)

    def fn(params, cache, batch):
        return toy.Outputs(y=toy.mix(toy.mix(batch.x, table), torch.full((4, 8), 3.0))), cache

    both_ways(fn, toy.weights(), toy.pools(), toy.inputs())


def test_zero_sized_and_scalar_tensors():
    def fn(params, cache, batch):
        empty = toy.mix(batch.x[:0], params.w[:0])
        return (empty, toy.mix(batch.x[0, 0], params.w[1, 1])), cache

    both_ways(fn, toy.weights(), toy.pools(), toy.inputs())


def test_inputs_may_be_strided_and_come_back():
    def fn(params, cache, batch):
        return (toy.mix(batch.x, params.w), batch.x), cache

    params, cache = toy.weights(), toy.pools()
    wide = torch.randn(4, 16)
    batch = toy.Inputs(x=wide[:, ::2], slots=torch.arange(4, dtype=torch.int32))
    compiled = program(fn).trace(params, cache, toy.inputs()).lower("cpu", machine=toy.MACHINE)
    (y, x), _ = compiled.compile(bind={"params": params, "cache": cache})(batch)
    assert x is batch.x
    assert torch.equal(y, batch.x * 2 + params.w)


def random_step(seed: int):
    """A step of about thirty random operators, views and writes over [4, 8] tensors."""
    ways = [VIEWS[name] for name in ("reshape", "alias", "unsqueeze")]

    def fn(params, cache, batch):
        rng = random.Random(seed)
        known, layers = [params.w, params.b, batch.x], list(cache.layers)
        for _ in range(30):
            a, b = rng.choice(known), rng.choice(known)
            match rng.randrange(7):
                case 0 | 1:
                    known.append(toy.mix(a, b, rng.choice([0.5, 1.0, 2.0])))
                case 2:
                    known += toy.both(a)
                case 3:
                    halves = torch.cat([a[:, :4], b[:, 4:]], 1)
                    known.append(halves)
                case 4:
                    known.append(rng.choice(ways)(a).reshape(4, 8))
                case 5:
                    k = rng.randrange(len(layers))
                    layers[k] = toy.put(layers[k], batch.slots, a)
                    known.append(toy.mix(layers[k][4:8], a))
                case 6:
                    left, right = a.chunk(2, 1)
                    known.append(toy.mix(left, right).repeat(1, 2))
            if len(known) > 6:
                known.pop(rng.randrange(3, len(known)))
        return tuple(known[3:]), toy.Pools(layers=tuple(layers))

    return fn


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_random_graphs_never_corrupt_the_arena(seed: int):
    torch.manual_seed(seed)
    lowered = both_ways(random_step(seed), toy.weights(), toy.pools(), toy.inputs(), runs=2)
    assert lowered.tape.arena_bytes <= lowered.tape.unshared_bytes


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 12)), max_size=40))
def test_blocks_that_live_together_never_overlap(drawn):
    blocks = [Block(size, first, first + length) for size, first, length in drawn]
    offsets, total = place(blocks)
    for i, (a, at) in enumerate(zip(blocks, offsets, strict=True)):
        assert at % ALIGNMENT == 0 and at + a.size <= total
        for b, other in zip(blocks[:i], offsets[:i], strict=True):
            together = a.first <= b.last and b.first <= a.last
            assert not (together and at < other + b.size and other < at + a.size and a.size and b.size)


def test_a_chain_needs_no_more_than_its_neighbours():
    def fn(params, cache, batch):
        x = batch.x
        for _ in range(20):
            x = toy.mix(x, params.w)
        return toy.Outputs(y=x), cache

    tape = program(fn).trace(toy.weights(), toy.pools(), toy.inputs()).lower("cpu", machine=toy.MACHINE).tape
    assert tape.arena_bytes == 2 * 4 * 8 * 4
    assert tape.unshared_bytes == 20 * 4 * 8 * 4


def test_an_arena_serves_programs_of_different_sizes():
    arena, params = Arena(), [toy.weights(rows) for rows in (4, 8)]
    batches, caches = [toy.inputs(rows) for rows in (4, 8)], [toy.pools() for _ in range(2)]
    compiled = [
        program(toy.step)
        .trace(p, c, b)
        .lower("cpu", machine=toy.MACHINE)
        .compile(bind={"params": p, "cache": c}, arena=arena)
        for p, c, b in zip(params, caches, batches, strict=True)
    ]
    for _ in range(3):
        for p, c, b, run in zip(params, caches, batches, compiled, strict=True):
            mirror = map_leaves(torch.clone, c)
            same(toy.step(p, mirror, b), run(b))
    needs = [run.lowered.tape.arena_bytes for run in compiled]
    assert needs[0] < needs[1] == arena.buffer.nbytes


def test_results_survive_the_next_replay():
    params, cache = toy.weights(), toy.pools()
    lowered = program(toy.step).trace(params, cache, toy.inputs()).lower("cpu", machine=toy.MACHINE)
    run = lowered.compile(bind={"params": params, "cache": cache})
    first, _ = run(toy.inputs())
    kept = first.y.clone()
    second, _ = run(toy.inputs())
    assert torch.equal(first.y, kept) and not torch.equal(second.y, kept)


def test_rebinding_moves_the_program_to_other_memory():
    params, caches, batch = toy.weights(), [toy.pools(), toy.pools()], toy.inputs()
    run = (
        program(toy.step)
        .trace(params, caches[0], batch)
        .lower("cpu", machine=toy.MACHINE)
        .compile(bind={"params": params, "cache": caches[0]})
    )
    run(batch)
    run.rebind(cache=caches[1])
    _, cache = run(batch)
    assert cache.layers[0] is caches[1].layers[0]
    same(caches[0], caches[1])


@pytest.fixture
def lone_rank():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_collectives_run_between_kernels_and_are_waited_for(lone_rank: str):
    def fn(params, cache, batch):
        x = toy.mix(batch.x, params.w)
        total = functional.wait_tensor(functional.all_reduce(x, "sum", lone_rank))
        return toy.Outputs(y=toy.mix(total, params.b)), cache

    lowered = both_ways(fn, toy.weights(), toy.pools(), toy.inputs())
    assert lowered.python_segments == 1


def python_events(run, batch) -> int:
    """Calls, from Python or C, that one replay makes in this interpreter."""
    events = 0

    def count(frame, event, argument) -> None:
        nonlocal events
        events += event in ("call", "c_call")

    run(batch)
    sys.setprofile(count)
    run(batch)
    sys.setprofile(None)
    return events


def test_a_replay_does_the_same_python_work_whatever_the_graph():
    machine = replace(toy.MACHINE, run=lambda address, sections, count, threads: None)
    params, cache, batch = toy.weights(), toy.pools(), toy.inputs()

    def chain(length: int):
        def fn(params, cache, batch):
            x = batch.x
            for _ in range(length):
                x = toy.mix(x, params.w).view(8, 4).view(4, 8)
            return toy.Outputs(y=x), cache

        lowered = program(fn).trace(params, cache, batch).lower("cpu", machine=machine)
        return lowered.compile(bind={"params": params, "cache": cache})

    short, long = python_events(chain(1), batch), python_events(chain(100), batch)
    assert short == long < 60


def test_donated_arguments_must_be_bound():
    traced = program(toy.step).trace(toy.weights(), toy.pools(), toy.inputs())
    with pytest.raises(CaptureError, match=r"cache\.layers\[0\] is donated but not bound"):
        traced.lower("cpu", machine=toy.MACHINE).compile(bind={"params": toy.weights()})


def test_a_kernel_that_refuses_names_operator_and_line():
    def fn(params, cache, batch):
        return toy.Outputs(y=toy.mix(batch.x.view(2, 2, 2, 4), batch.x.view(2, 2, 2, 4))), cache

    with pytest.raises(
        CaptureError, match=r"toy\.mix cannot run here: expected at most 3 axes.*test_tape\.py:\d+ in fn"
    ):
        program(fn).trace(toy.weights(), toy.pools(), toy.inputs()).lower("cpu", machine=toy.MACHINE)


def test_the_text_shows_places_and_costs():
    lowered = program(toy.step).trace(toy.weights(), toy.pools(), toy.inputs()).lower("cpu", machine=toy.MACHINE)
    text = lowered.as_text()
    assert "toy decode[4x1, 1 pages] on cpu: 11 calls, 0 python segments, 6 views folded" in text
    assert "0 toy.mix(batch_x f32[4, 8], params_w f32[4, 8]) -> arena+0x0 f32[4, 8]" in text
    assert "toy.put" in text and "total" in text
