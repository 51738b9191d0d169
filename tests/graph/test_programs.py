"""The set of compiled programs: buckets, laziness, freezing, counting."""

import pytest
import torch

from dsv4.config import StepShape
from dsv4.errors import CaptureError
from dsv4.graph import Arena, Programs, StepProgram
from dsv4.graph.targets import register
from tests.graph import toy

SHAPES = [StepShape("decode", rows, 1, pages) for rows in (1, 2, 8) for pages in (1, 4)] + [
    StepShape("prefill", 8, 8, 4)
]


@pytest.fixture(autouse=True)
def toy_target():
    from dsv4.graph.cpu import CpuLowered

    register("toy", lambda traced: CpuLowered(traced, machine=toy.MACHINE))
    yield


def programs(**options) -> tuple[Programs, list[StepShape]]:
    params = {rows: toy.weights(rows) for rows in (1, 2, 8)}
    asked: list[StepShape] = []

    def recipe(shape: StepShape):
        asked.append(shape)

        def step(cache, batch):
            return toy.step(params[shape.rows], cache, batch)

        return StepProgram(shape.kind, step, shape, ("cache",)), (toy.pools(), toy.inputs(shape.rows))

    return Programs(recipe, SHAPES, target="toy", **options), asked


def test_buckets_take_the_smallest_that_fits():
    built, _ = programs()
    assert built.bucket_rows("decode", 3) == 8
    assert built.bucket_pages("decode", 8, 2) == 4
    assert built.fit("decode", 2, 1) == StepShape("decode", 2, 1, 1)
    assert built.fit("prefill", 1, 1) == StepShape("prefill", 8, 8, 4)


def test_what_no_bucket_holds_is_named():
    built, _ = programs()
    with pytest.raises(CaptureError, match="9 rows of decode: the largest program has 8"):
        built.bucket_rows("decode", 9)
    with pytest.raises(CaptureError, match="5 pages of decode with 2 rows: the largest program has 4"):
        built.fit("decode", 2, 5)
    with pytest.raises(CaptureError, match="1 rows of seed: the largest program has 0"):
        built.fit("seed", 1, 1)


def test_a_program_is_compiled_once_on_first_use():
    cache = toy.pools()
    built, asked = programs(bind={"cache": cache})
    shape = built.fit("decode", 2, 1)
    assert len(built) == 0
    for _ in range(3):
        built[shape](toy.inputs(2))
    assert asked == [shape]
    stats = built.stats()[shape]
    assert (stats.traces, stats.compiles, stats.replays) == (1, 1, 3)
    assert stats.seconds > 0


def test_after_freezing_a_missing_program_is_an_error_that_names_its_shape():
    built, _ = programs(bind={"cache": toy.pools()})
    ready = StepShape("decode", 1, 1, 1)
    assert built[ready] is built[ready]
    built.freeze()
    assert built[ready].replays == 0
    with pytest.raises(
        CaptureError, match=r"no program for decode\[8x1, 4 pages\].*compiled are decode\[1x1, 1 pages\]"
    ):
        built[StepShape("decode", 8, 1, 4)]


def test_all_are_compiled_ahead_over_one_arena():
    cache, arena = toy.pools(), Arena()
    built, asked = programs(bind={"cache": cache}, options={"arena": arena})
    buffers = {id(arena.buffer) for _ in built.compile()}
    assert len(buffers) == 1, "the largest program comes first, so the arena is made once"
    assert set(asked) == set(built) == set(SHAPES)
    for shape in built:
        out, back = built[shape](toy.inputs(shape.rows))
        assert torch.isfinite(out.y).all()
        assert back.layers[0] is cache.layers[0]


def test_rebinding_moves_every_program():
    built, _ = programs(bind={"cache": toy.pools()})
    shapes = SHAPES[:2]
    for shape in shapes:
        built[shape](toy.inputs(shape.rows))
    other = toy.pools()
    built.rebind(cache=other)
    for shape in SHAPES[:3]:
        _, back = built[shape](toy.inputs(shape.rows))
        assert back.layers[1] is other.layers[1]
