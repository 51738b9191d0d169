"""Partitions of one step get one sequence of captured shapes; widening adds dummy rows and changes nothing else."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dsv4.config import StepShape
from serving.align import aligner
from serving.batches import BatchBuilder, Launch, RowExtras, StepWork, default_buckets
from serving.plan import PartitionPlan, PrefillChunk, ScheduledRequest, Seat, TableUpdates

DUMMY, VOCAB, LIMIT = 8, 70, 900
BUCKETS = default_buckets(1024, DUMMY, 4, 128, fine=True)
WORDS = -(-VOCAB // 32)


def seat(slot: int, known: int) -> Seat:
    request = ScheduledRequest(request_id=str(slot), tokens=[1 + i % 60 for i in range(known)], max_tokens=20)
    request.limit = LIMIT
    return Seat(request, 0, slot, [], 0)


@st.composite
def steps(draw) -> tuple[int, list[StepWork]]:
    """(k, one step's work per partition): any mix of prefill, seeds and decode, some of it full."""
    k = draw(st.sampled_from([0, 7]))
    works = []
    for _ in range(draw(st.integers(1, 4))):
        slots = draw(st.permutations(range(DUMMY)))
        split = draw(st.integers(0, 3)), draw(st.integers(0, 5))
        prefill = []
        for slot in slots[: split[0]]:
            known = draw(st.integers(1, 300))
            final = draw(st.booleans())
            prefill.append(PrefillChunk(seat(slot, known + (0 if final else 5)), 0, known, final))
        decode = [seat(slot, 30) for slot in slots[split[0] : sum(split)]]
        plan = PartitionPlan({"window": TableUpdates([0], [1], [2])}, prefill, decode)
        special = draw(st.sets(st.sampled_from(slots[: max(1, sum(split))]), max_size=2))
        extras = {slot: RowExtras(np.full((k + 1, WORDS), 5, np.int32)) for slot in special}
        works.append(BatchBuilder(BUCKETS, DUMMY, k, VOCAB).build(plan, extras))
    return k, works


def live(launch: Launch) -> dict[str, list]:
    """What a launch says of its live rows."""
    rows = launch.live
    found = {
        name: values[:rows].tolist()
        for name, values in launch.arrays.items()
        if name not in ("ids", "last", "mask", "drafts")
    }
    if "ids" in launch.arrays:
        length = launch.arrays["length"]
        found["ids"] = [launch.arrays["ids"][r, : length[r]].tolist() for r in range(rows)]
        flat = launch.arrays["ids"].reshape(-1)
        found["last"] = [int(flat[at]) for at in launch.arrays["last"][:rows]]
    return found


@given(steps())
def test_one_sequence_of_captured_shapes(step: tuple[int, list[StepWork]]) -> None:
    k, works = step
    captured = set(BUCKETS.shapes(k))
    aligned = aligner(BUCKETS, DUMMY, VOCAB)(works)
    sequences = [[launch.shape for launch in work.launches] for work in aligned]
    assert all(sequence == sequences[0] for sequence in sequences) and captured.issuperset(sequences[0])
    for before, after in zip(works, aligned, strict=True):
        assert after.tables is before.tables
        for kind in ("prefill", "seed", "decode", "speculate"):
            old = [launch for launch in before.launches if launch.shape.kind == kind]
            new = [launch for launch in after.launches if launch.shape.kind == kind]
            assert [live(launch) for launch in new[: len(old)]] == [live(launch) for launch in old]
            assert all(launch.live == 0 for launch in new[len(old) :])
        kinds = [launch.shape.kind for launch in after.launches]
        assert [kind for kind, _ in itertools.groupby(kinds)] == sorted(
            set(kinds), key=["prefill", "seed", "decode", "speculate"].index
        )
        for launch in after.launches:
            check_padding(launch)


def check_padding(launch: Launch) -> None:
    """Dummy rows run and change nothing: the dummy slot, no length, no limit, no constraint."""
    shape, arrays, first = launch.shape, launch.arrays, launch.live
    assert set(arrays["slots"][first:].tolist()) <= {DUMMY} and len(arrays["slots"]) == shape.rows
    if shape.kind == "prefill":
        assert arrays["ids"].shape == (shape.rows, shape.query_len)
        assert not arrays["length"][first:].any() and not arrays["limit"][first:].any()
        assert set(arrays["final"][first:].tolist()) <= {DUMMY} and set(arrays["eos"][first:].tolist()) <= {-1}
    if shape.full:
        queries = 1 if shape.kind == "prefill" else shape.query_len
        assert arrays["mask"].shape == (shape.rows * queries, WORDS) and (arrays["mask"][first * queries :] == -1).all()
        assert arrays["drafts"].shape == (shape.rows, queries - 1) and (arrays["drafts"][first:] == -1).all()
    assert all(values.dtype == np.int32 for values in arrays.values())


def test_one_partition_is_left_alone() -> None:
    work = StepWork({}, (Launch(StepShape("decode", 1, 1, 8), {"slots": np.zeros(1, np.int32)}, 1),))
    assert aligner(BUCKETS, DUMMY, VOCAB)([work]) == [work]
