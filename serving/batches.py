"""From a partition's plan (integers) to padded arrays of static shapes, and from a step's output back to tokens.

A step is a list of launches in a fixed order: prefill launches (tiles packed in plan order), then seeds (K > 0: a request's
first drafts, just before its first decode row, so that its first token need not wait for them), then one decode or speculate
launch. With K > 0 a step may decode plainly (`serving/pace.py`); its slots are seeded again before they next verify drafts.
Everything here is numpy int32 and picklable: it is what one engine process sends to its workers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsv4.config import StepKind, StepShape
from dsv4.errors import ConfigError
from serving.pages import BLOCK_TOKENS
from serving.plan import PartitionPlan, PartitionResult, PrefillChunk

Array = np.ndarray
_SCORES = ("chosen", "top_ids", "top")


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The static shapes a server captures; a step takes the smallest that fits.

    rows: decode rows per launch. tiles: (query_len, rows) of prefill launches, by tokens. pages: history pages in view.
    """

    rows: tuple[int, ...]
    tiles: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]

    @property
    def full_rows(self) -> tuple[int, ...]:
        """Rows of full steps: few sizes, because they are rare and every size is a program."""
        return tuple(sorted({self.rows[0], self.rows[-1]}))

    @property
    def full_tiles(self) -> tuple[tuple[int, int], ...]:
        """Tiles of full steps: the smallest, one whole tile, the largest."""
        longest = max(query_len for query_len, _ in self.tiles)
        whole = next(at for at in self.tiles if at[0] == longest)
        return tuple(dict.fromkeys((self.tiles[0], whole, self.tiles[-1])))

    def shapes(self, k: int, *, adaptive: bool = False) -> Iterator[StepShape]:
        """Every program of a server with k drafts; adaptive: those of steps that verify none, too."""
        for pages in self.pages:
            for full in (False, True):
                for query_len, rows in self.full_tiles if full else self.tiles:
                    yield StepShape("prefill", rows, query_len, pages, full)
                for rows in self.full_rows if full else self.rows:
                    yield StepShape("speculate" if k else "decode", rows, k + 1, pages, full)
        if k:
            for rows in self.rows:
                yield StepShape("seed", rows, k, self.pages[0])  # drafting sees a window, never the history
        if k and adaptive:
            for pages in self.pages:
                for rows in self.rows:
                    yield StepShape("decode", rows, 1, pages)


def default_buckets(max_model_len: int, max_rows: int, max_tiles: int, tile: int, *, fine: bool = False) -> Buckets:
    """Powers of two up to the limits; a short tile for what a prefix hit or a short prompt leaves; contexts by factors of 8.

    fine: more prefill shapes, where a program costs milliseconds to capture and padding rows cost time in every product.
    """

    def powers(most: int, first: int = 1, factor: int = 2) -> tuple[int, ...]:
        sizes = []
        while first < most:
            sizes.append(first)
            first *= factor
        return (*sizes, most)

    if max_tiles < 1:
        raise ConfigError(f"a prefill launch needs room for one tile of {tile} tokens")
    counts = range(1, max_tiles + 1) if fine else powers(max_tiles, factor=4)
    tiles = [(16, 1), *((tile, rows) for rows in counts)]
    if fine:
        tiles += [(length, rows) for length in (tile // 4, tile // 2) for rows in {1, max_tiles}]
    return Buckets(
        rows=powers(max_rows),
        tiles=tuple(sorted(tiles, key=lambda at: (at[0] * at[1], at[1]))),
        pages=powers(-(-max_model_len // BLOCK_TOKENS), 64, 8),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """One program replay. `arrays` are the fields of its batch; `live` rows carry requests, the rest is padding."""

    shape: StepShape
    arrays: dict[str, Array]
    live: int


@dataclass(frozen=True, slots=True)
class RowExtras:
    """What a request asks of its row beyond a token. mask [rows, W] int32: legal tokens of the row's first query rows;
    drafts: to verify instead of the slot's own."""

    mask: Array | None = None
    drafts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RowDetails:
    """What a full step says of one row: the slot's next drafts, and log-probabilities by query row (see `batch.Scores`)."""

    drafts: list[int]
    chosen: Array
    top_ids: Array
    top: Array


@dataclass(frozen=True, slots=True)
class StepWork:
    """A partition's step. tables[group] = (slots, columns, pages): entries to write first."""

    tables: dict[str, tuple[Array, Array, Array]]
    launches: tuple[Launch, ...]


@dataclass(frozen=True, slots=True)
class _Tile:
    slot: int
    start: int
    ids: Sequence[int]
    chunk: PrefillChunk
    final: bool


class BatchBuilder:
    """Builds the work of one partition, step after step. `dummy` is the slot of padding rows (the number of real slots)."""

    def __init__(self, buckets: Buckets, dummy: int, k: int, vocab_size: int) -> None:
        self._buckets = buckets
        self._dummy = dummy
        self._k = k
        self._words = -(-vocab_size // 32)
        self._tile = max(query_len for query_len, _ in buckets.tiles)
        self._unseeded: set[int] = set()  # slots whose drafter has not run since their last token
        self._steady: tuple[tuple, Launch] | None = None  # the last launch of rows: mostly the next one is the same

    def build(
        self, plan: PartitionPlan, extras: Mapping[int, RowExtras] | None = None, *, drafts: bool = True
    ) -> StepWork:
        """The launches of a plan, in the order of this module's docstring. `extras` by slot makes them full steps.

        drafts: whether decode rows verify drafts, if K > 0; full steps always do.
        """
        extras = extras or {}
        drafts = drafts and self._k > 0
        launches = list(self._prefill(plan.prefill, extras))
        if self._k and (slots := self._seeds(plan, extras, drafts)):
            launches += self._rows("seed", self._k, slots, 0, {})
        if plan.decode:
            kind: StepKind = "speculate" if drafts else "decode"
            reach = max(min(seat.upper, seat.request.limit) for seat in plan.decode)
            slots = plan.slots
            asked = kind, self._pages(reach), *slots
            if self._steady is not None and self._steady[0] == asked and not extras:
                launches.append(self._steady[1])
            else:
                rows = list(self._rows(kind, self._k + 1 if drafts else 1, slots, reach, extras))
                self._steady = (asked, rows[0]) if len(rows) == 1 and not extras else None
                launches += rows
        tables = {
            group: tuple(np.array(column, np.int32) for column in (updates.slots, updates.columns, updates.pages))
            for group, updates in plan.table_updates.items()
            if updates.slots
        }
        return StepWork(tables, tuple(launches))

    def _seeds(self, plan: PartitionPlan, extras: Mapping[int, RowExtras], drafts: bool) -> list[int]:
        """Slots to draft for in this step: those about to verify, and those whose drafts the host must know before they do."""
        if drafts and not self._unseeded and not plan.prefill:
            return []
        self._unseeded |= {chunk.slot for chunk in plan.finals}
        told = extras.keys() & {chunk.slot for chunk in plan.finals}
        slots = sorted(self._unseeded & (told | set(plan.slots if drafts else ())))
        self._unseeded -= set(slots)
        if not drafts:
            self._unseeded |= set(plan.slots)
        return slots

    def result(
        self, plan: PartitionPlan, work: StepWork, outputs: Sequence[dict[str, Array] | None]
    ) -> PartitionResult:
        """What the scheduler commits: `outputs` are the launches' output leaves by name."""
        first: list[int] = []
        rows: list[list[int]] = []
        proposed: list[int] = []
        for launch, out in zip(work.launches, outputs, strict=True):
            if launch.shape.kind == "prefill":
                finals = np.flatnonzero(launch.arrays["limit"])
                first += out["tokens"][finals, 0].tolist()
            elif launch.shape.kind != "seed":
                tokens, count = out["tokens"].tolist(), out["count"].tolist()
                rows += [tokens[r][: count[r]] for r in range(launch.live)]
                if launch.shape.kind == "speculate":
                    proposed += out["proposed"][: launch.live].tolist()
        return PartitionResult(first, rows, proposed)

    def details(self, work: StepWork, outputs: Sequence[dict[str, Array]]) -> dict[int, RowDetails]:
        """By slot, what full launches (and the seeds of their prompts) returned beyond tokens."""
        found: dict[int, RowDetails] = {}
        for launch, out in zip(work.launches, outputs, strict=True):
            shape, arrays = launch.shape, launch.arrays
            if shape.kind == "seed":
                for row, slot in enumerate(arrays["slots"][: launch.live].tolist()):
                    if slot in found:
                        found[slot] = replace(found[slot], drafts=out["drafts"][row].tolist())
            elif shape.full:
                prefill = shape.kind == "prefill"
                scores = {name: out[name].reshape(shape.rows, -1, *out[name].shape[1:]) for name in _SCORES}
                rows = np.flatnonzero(arrays["limit"]) if prefill else range(launch.live)
                for row in rows:
                    drafts = [] if prefill or not self._k else out["drafts"][row].tolist()
                    slot = int(arrays["final" if prefill else "slots"][row])
                    found[slot] = RowDetails(drafts, *(scores[name][row] for name in _SCORES))
        return found

    def _extras(self, shape: StepShape, slots: Sequence[int], extras: Mapping[int, RowExtras]) -> dict[str, Array]:
        """The arrays of `batch.Extras`; `slots[row]` is whom a row belongs to, -1 for nobody."""
        queries = 1 if shape.kind == "prefill" else shape.query_len
        mask = np.full((shape.rows, queries, self._words), -1, np.int32)
        drafts = np.full((shape.rows, 0 if shape.kind == "prefill" else shape.query_len - 1), -1, np.int32)
        for row, slot in enumerate(slots):
            extra = extras.get(slot)
            if extra is None:
                continue
            if extra.mask is not None:
                legal = extra.mask[:queries]
                mask[row, : len(legal)] = legal
            if drafts.shape[1] and len(extra.drafts):
                drafts[row, : len(extra.drafts)] = extra.drafts[: drafts.shape[1]]
        return {"mask": mask.reshape(-1, self._words), "drafts": drafts}

    def _pages(self, positions: int) -> int:
        needed = -(-positions // BLOCK_TOKENS)
        return next(pages for pages in self._buckets.pages if pages >= needed)

    def _rows(
        self, kind: StepKind, query_len: int, slots: list[int], reach: int, extras: Mapping[int, RowExtras]
    ) -> Iterator[Launch]:
        most = self._buckets.rows[-1]
        for first in range(0, len(slots), most):
            part = slots[first : first + most]
            full = not extras.keys().isdisjoint(part)
            sizes = self._buckets.full_rows if full else self._buckets.rows
            rows = next(rows for rows in sizes if rows >= len(part))
            pages = self._buckets.pages[0] if kind == "seed" else self._pages(reach)
            shape = StepShape(kind, rows, query_len, pages, full)
            arrays = {"slots": np.full(rows, self._dummy, np.int32)}
            arrays["slots"][: len(part)] = part
            if full:
                arrays |= self._extras(shape, part, extras)
            yield Launch(shape, arrays, len(part))

    def _prefill(self, chunks: Sequence[PrefillChunk], extras: Mapping[int, RowExtras]) -> Iterator[Launch]:
        tiles = [
            _Tile(c.slot, c.start + at, tokens[at : at + self._tile], c, c.final and at + self._tile >= c.length)
            for c in chunks
            for tokens in (c.tokens,)
            for at in range(0, c.length, self._tile)
        ]
        most = max(rows for _, rows in self._buckets.tiles)
        for first in range(0, len(tiles), most):
            yield self._pack(tiles[first : first + most], extras)

    def _pack(self, tiles: Sequence[_Tile], extras: Mapping[int, RowExtras]) -> Launch:
        longest = max(len(tile.ids) for tile in tiles)
        n = len(tiles)
        finals = [tile.slot if tile.final else -1 for tile in tiles]
        full = not extras.keys().isdisjoint(finals)
        sizes = self._buckets.full_tiles if full else self._buckets.tiles
        query_len, rows = next((q, r) for q, r in sizes if q >= longest and r >= n)

        def column(values: Sequence[int], padding: int) -> Array:
            out = np.full(rows, padding, np.int32)
            out[:n] = values
            return out

        ids = np.zeros((rows, query_len), np.int32)
        for row, tile in enumerate(tiles):
            ids[row, : len(tile.ids)] = tile.ids
        length = column([len(tile.ids) for tile in tiles], 0)
        requests = [tile.chunk.seat.request for tile in tiles]
        eos = [-1 if r.eos_token_id is None else r.eos_token_id for r in requests]
        arrays = {
            "slots": column([tile.slot for tile in tiles], self._dummy),
            "start": column([tile.start for tile in tiles], 0),
            "length": length,
            "ids": ids,
            "last": (np.arange(rows, dtype=np.int32) * query_len + np.maximum(length - 1, 0)).astype(np.int32),
            "final": column([t.slot if t.final else self._dummy for t in tiles], self._dummy),
            "limit": column([r.limit if t.final else 0 for t, r in zip(tiles, requests, strict=True)], 0),
            "eos": column([e if t.final else -1 for t, e in zip(tiles, eos, strict=True)], -1),
        }
        reach = max(tile.start + len(tile.ids) for tile in tiles)
        shape = StepShape("prefill", rows, query_len, self._pages(reach), full)
        if full:
            arrays |= self._extras(shape, finals, extras)
        return Launch(shape, arrays, n)
