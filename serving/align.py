"""One sequence of program shapes for all partitions of a step.

Ranks meet in collectives, so every rank replays the same programs in the same order: the i-th launch of each kind has the
least shape that holds it in every partition, and partitions with less to do, or nothing, run dummy rows there.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dsv4.config import StepKind, StepShape
from serving.batches import Array, Buckets, Launch, StepWork

_KINDS: tuple[StepKind, ...] = ("prefill", "seed", "decode", "speculate")  # the order within a step
_PREFILL = ("slots", "start", "length", "last", "final", "limit", "eos")


def aligner(buckets: Buckets, dummy: int, vocab_size: int) -> Callable[[Sequence[StepWork]], list[StepWork]]:
    """A function that widens the launches of all partitions to common shapes; each keeps its own launches first, per kind.

    dummy: the slot of padding rows.
    """
    words = -(-vocab_size // 32)

    def align(works: Sequence[StepWork]) -> list[StepWork]:
        launches: list[list[Launch]] = [[] for _ in works]
        for kind in _KINDS:
            each = [[launch for launch in work.launches if launch.shape.kind == kind] for work in works]
            for i in range(max(map(len, each))):
                shape = _common([own[i].shape for own in each if i < len(own)], buckets)
                for own, out in zip(each, launches, strict=True):
                    out.append(_widen(own[i] if i < len(own) else _nothing(shape), shape, dummy, words))
        return [StepWork(work.tables, tuple(own)) for work, own in zip(works, launches, strict=True)]

    return align


def _common(shapes: Sequence[StepShape], buckets: Buckets) -> StepShape:
    """The least captured shape that holds all of these."""
    full = any(shape.full for shape in shapes)
    rows, query_len, pages = (max(getattr(shape, name) for shape in shapes) for name in ("rows", "query_len", "pages"))
    kind = shapes[0].kind
    if kind == "prefill":
        tiles = buckets.full_tiles if full else buckets.tiles
        query_len, rows = next((q, r) for q, r in tiles if q >= query_len and r >= rows)
    else:
        rows = next(size for size in (buckets.full_rows if full else buckets.rows) if size >= rows)
    return StepShape(kind, rows, query_len, pages, full)


def _nothing(shape: StepShape) -> Launch:
    """A launch of no rows."""
    arrays = {name: np.zeros(0, np.int32) for name in (_PREFILL if shape.kind == "prefill" else ("slots",))}
    if shape.kind == "prefill":
        arrays["ids"] = np.zeros((0, shape.query_len), np.int32)
    return Launch(StepShape(shape.kind, 0, shape.query_len, shape.pages), arrays, 0)


def _widen(launch: Launch, shape: StepShape, dummy: int, words: int) -> Launch:
    """The same launch at a shape that is nowhere smaller."""
    if launch.shape == shape:
        return launch
    prefill = shape.kind == "prefill"
    arrays = dict(launch.arrays)
    if shape.full:
        masked, drafts = (1, 0) if prefill else (shape.query_len, shape.query_len - 1)
        arrays.setdefault("mask", np.zeros((0, words), np.int32))
        arrays.setdefault("drafts", np.zeros((0, drafts), np.int32))
        arrays["mask"] = _pad(arrays["mask"], shape.rows * masked, -1)
        arrays["drafts"] = _pad(arrays["drafts"], shape.rows, -1)
    padding = {"slots": dummy, "final": dummy, "eos": -1}
    for name in _PREFILL:
        if name in arrays:
            arrays[name] = _pad(arrays[name], shape.rows, padding.get(name, 0))
    if prefill:
        ids = arrays["ids"]
        wide = np.zeros((shape.rows, shape.query_len), np.int32)
        wide[: ids.shape[0], : ids.shape[1]] = ids
        first = np.arange(shape.rows, dtype=np.int32) * shape.query_len
        arrays |= {"ids": wide, "last": first + np.maximum(arrays["length"] - 1, 0)}
    return Launch(shape, arrays, launch.live)


def _pad(rows: Array, count: int, value: int) -> Array:
    out = np.full((count, *rows.shape[1:]), value, rows.dtype)
    out[: len(rows)] = rows
    return out
