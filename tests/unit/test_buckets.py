"""Prefill launches: every plan fits a captured program, and padding stays small where programs are cheap."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from dsv4.errors import ConfigError
from serving.batches import BatchBuilder, RowExtras, default_buckets
from serving.plan import PartitionPlan, PrefillChunk

SLOTS = 8


def chunk(slot: int, length: int, start: int = 0) -> PrefillChunk:
    tokens = list(range(1, start + length + 1))
    request = SimpleNamespace(tokens=tokens, limit=len(tokens) + 4, eos_token_id=None)
    return PrefillChunk(SimpleNamespace(request=request, slot=slot), start, length, True)


def launches(lengths: list[int], *, fine: bool, extras=None):
    builder = BatchBuilder(default_buckets(4096, SLOTS, 4, 128, fine=fine), SLOTS, 0, 64)
    plan = PartitionPlan({}, prefill=[chunk(slot, n, 5 * slot) for slot, n in enumerate(lengths)])
    return builder.build(plan, extras).launches


@pytest.mark.parametrize("fine", [False, True])
def test_every_plan_has_a_program_and_keeps_its_tokens(fine: bool) -> None:
    rng = random.Random(0)
    shapes = set(default_buckets(4096, SLOTS, 4, 128, fine=fine).shapes(0))
    for _ in range(200):
        lengths = [
            rng.choice([1, 5, 16, 17, 33, 64, 65, 127, 128, 129, 300, 700]) for _ in range(rng.randint(1, SLOTS))
        ]
        extras = {rng.randrange(SLOTS): RowExtras()} if rng.random() < 0.3 else None
        found = launches(lengths, fine=fine, extras=extras)
        assert {launch.shape for launch in found} <= shapes
        ids: dict[int, list[int]] = {}
        for launch in found:
            a = launch.arrays
            for row in range(launch.live):
                ids.setdefault(int(a["slots"][row]), []).extend(a["ids"][row, : a["length"][row]].tolist())
        assert ids == {slot: list(range(5 * slot + 1, 5 * slot + n + 1)) for slot, n in enumerate(lengths)}
        assert all((launch.arrays["slots"][launch.live :] == SLOTS).all() for launch in found)
        assert sum(np.count_nonzero(launch.arrays["limit"]) for launch in found) == len(lengths)


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [([1], 16), ([17], 32), ([40], 64), ([65], 128), ([200], 256), ([330], 384), ([400], 512), ([30] * 4, 128), ([50, 60], 256)],
)  # fmt: skip
def test_fine_buckets_pad_little(lengths: list[int], tokens: int) -> None:
    assert sum(launch.shape.tokens for launch in launches(lengths, fine=True)) == tokens


def test_first_drafts_wait_for_the_first_decode_row() -> None:
    """A first token is out before its request's drafter has run; a request that ends with it never pays for one."""
    builder = BatchBuilder(default_buckets(4096, SLOTS, 4, 128), SLOTS, 7, 64)

    def kinds(prefill: list[int], decode: list[int], extras=None) -> list[tuple[str, list[int]]]:
        chunks = [chunk(slot, 20) for slot in prefill]
        seats = [SimpleNamespace(slot=s, upper=20, request=SimpleNamespace(limit=99)) for s in decode]
        work = builder.build(PartitionPlan({}, prefill=chunks, decode=seats), extras)
        return [(at.shape.kind, at.arrays["slots"][: at.live].tolist()) for at in work.launches]

    assert kinds([3, 1, 2], []) == [("prefill", [3, 1, 2])]
    assert kinds([4], [1, 3]) == [("prefill", [4]), ("seed", [1, 3]), ("speculate", [1, 3])]
    assert kinds([2], [3]) == [("prefill", [2]), ("speculate", [3])]  # the former request in slot 2 never decoded
    assert kinds([], [4, 2]) == [("seed", [2, 4]), ("speculate", [4, 2])]
    assert kinds([5], [], {5: RowExtras()}) == [
        ("prefill", [5]),
        ("seed", [5]),
    ]  # its drafts decide the next step's masks
    assert kinds([], [5]) == [("speculate", [5])]


def test_slots_are_seeded_again_after_plain_steps() -> None:
    buckets = default_buckets(4096, SLOTS, 4, 128)
    builder = BatchBuilder(buckets, SLOTS, 7, 64)
    shapes = set(buckets.shapes(7, adaptive=True))

    def kinds(decode: list[int], drafts: bool, extras=None) -> list[tuple[str, list[int]]]:
        seats = [SimpleNamespace(slot=s, upper=20, request=SimpleNamespace(limit=99)) for s in decode]
        work = builder.build(PartitionPlan({}, decode=seats), extras, drafts=drafts)
        assert {launch.shape for launch in work.launches} <= shapes
        return [(at.shape.kind, at.arrays["slots"][: at.live].tolist()) for at in work.launches]

    assert kinds([1, 2], True) == [("speculate", [1, 2])]
    assert kinds([2, 3], False) == [("decode", [2, 3])]
    assert kinds([2], False) == [("decode", [2])]
    assert kinds([1, 3], True) == [("seed", [3]), ("speculate", [1, 3])]
    assert kinds([1, 2, 3], True) == [("seed", [2]), ("speculate", [1, 2, 3])]
    assert kinds([1, 2, 3], True) == [("speculate", [1, 2, 3])]
    assert not {s for s in buckets.shapes(7) if s.kind == "decode"}


def test_full_steps_come_in_few_sizes() -> None:
    buckets = default_buckets(1024, SLOTS, 4, 128, fine=True)
    assert buckets.full_tiles == ((16, 1), (128, 1), (128, 4))
    (launch,) = launches([40], fine=True, extras={0: RowExtras()})
    assert launch.shape.full and (launch.shape.query_len, launch.shape.rows) == (128, 1)
    with pytest.raises(ConfigError):
        default_buckets(1024, SLOTS, 0, 128)
