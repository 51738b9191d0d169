"""Drives the step functions directly: every slot owns all the pages it can use, shuffled, in rings."""

import math
from collections.abc import Sequence

import torch

from dsv4.batch import PrefillBatch, RowBatch, make_row_state
from dsv4.cache import PAGE_TOKENS, Pages, make_cache
from dsv4.config import ModelConfig, StepShape
from dsv4.model.context import Env
from dsv4.ops.table import PLAIN, OpSet
from dsv4.params import Params, act_dtype
from dsv4.steps import STEPS

CHUNK = 512


def i32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Runner:
    """Slots 0..slots-1; greedy tokens in, greedy tokens out. `eos` -1 ignores the end token."""

    def __init__(
        self, cfg: ModelConfig, params: Params, *, ops: OpSet = PLAIN, slots: int = 4, k: int = 0, max_len: int = 1024,
        seed: int = 0, drafter: bool | None = None,
    ) -> None:  # fmt: skip
        self.cfg, self.params, self.k, self.slots, self.max_len = cfg, params, k, slots, max_len
        self.env = Env(cfg=cfg, ops=ops)
        reach = {"window": cfg.sliding_window, "tail": 8, "open": 128}
        widths = {"history": math.ceil(max_len / 128)}
        widths |= {g: math.ceil((reach[g] + CHUNK) / PAGE_TOKENS[g]) + 1 for g in reach}
        with_context = params.drafter is not None if drafter is None else drafter
        self.cache = make_cache(
            cfg, Pages(**{g: 1 + slots * w for g, w in widths.items()}), act_dtype(params), drafter=with_context
        )  # fmt: skip
        self.state = make_row_state(slots, widths, k)
        rng = torch.Generator().manual_seed(seed)
        for group, width in widths.items():
            order = torch.randperm(slots * width, generator=rng).to(torch.int32) + 1
            getattr(self.state.tables, group)[:slots] = order.view(slots, width)
        self.verify_steps = 0

    @property
    def pages(self) -> int:
        return self.state.tables.history.shape[1]

    @torch.no_grad()
    def _step(self, kind: str, rows: int, query_len: int, batch):
        step = STEPS[kind](self.env, StepShape(kind, rows, query_len, self.pages))
        out, self.cache, self.state = step(self.params, self.cache, self.state, batch)
        return out

    def prefill_tiles(
        self, tiles: Sequence[tuple[int, int, Sequence[int], int, int]], query_len: int = 128
    ) -> list[int]:
        """Each tile: (slot, start, ids, limit or 0 if not final, eos). Returns one token or -1 per tile."""
        dummy, rows = self.slots, len(tiles)
        ids = torch.zeros(rows, query_len, dtype=torch.int32)
        for r, tile in enumerate(tiles):
            ids[r, : len(tile[2])] = i32(list(tile[2]))
        length = i32([len(t[2]) for t in tiles])
        batch = PrefillBatch(
            slots=i32([t[0] if t[2] else dummy for t in tiles]), start=i32([t[1] for t in tiles]), length=length, ids=ids,
            last=(torch.arange(rows, dtype=torch.int32) * query_len + length - 1).clamp(min=0),
            final=i32([t[0] if t[3] else dummy for t in tiles]), limit=i32([t[3] for t in tiles]),
            eos=i32([t[4] for t in tiles]),
        )  # fmt: skip
        return self._step("prefill", rows, query_len, batch).tokens[:, 0].tolist()

    def prefill(
        self, slot: int, ids: Sequence[int], *, max_tokens: int = 64, eos: int = -1, chunks: Sequence[int] = ()
    ) -> int:
        """Runs a prompt in the given chunks (then one for the rest) and seeds the drafter; returns the first token."""
        limit, start, token = len(ids) + max_tokens, 0, -1
        for size in [*chunks, len(ids)]:
            end = min(start + size, len(ids))
            tiles = [
                (slot, s, ids[s : min(s + 128, end)], limit if min(s + 128, end) == len(ids) else 0, eos)
                for s in range(start, end, 128)
            ]
            if tiles:
                token = self.prefill_tiles(tiles)[-1]
            start = end
        if self.k:
            self._step("seed", 1, self.k, RowBatch(slots=i32([slot])))
        return token

    def decode(self, slots: Sequence[int], rows: int | None = None) -> list[list[int]]:
        """One step over the given slots, padded to `rows`; the tokens each emitted."""
        padded = [*slots, *[self.slots] * ((rows or len(slots)) - len(slots))]
        kind = "speculate" if self.k else "decode"
        out = self._step(kind, len(padded), self.k + 1, RowBatch(slots=i32(padded)))
        self.verify_steps += 1
        return [t[:c] for t, c in zip(out.tokens.tolist(), out.count.tolist(), strict=True)][: len(slots)]

    def generate(
        self, slot: int, ids: Sequence[int], max_tokens: int, *, chunks: Sequence[int] = (), eos: int = -1
    ) -> list[int]:
        tokens = [self.prefill(slot, ids, max_tokens=max_tokens, chunks=chunks, eos=eos)]
        while len(tokens) < max_tokens and tokens[-1] != eos:
            new = self.decode([slot])[0]
            assert new
            tokens += new
        return tokens

    def force(self, slot: int, drafts: Sequence[int]) -> None:
        """A test drafter: replaces the slot's next drafts."""
        self.state.drafts[slot] = i32(list(drafts))

    def rows(self, slot: int, n: int) -> dict[str, torch.Tensor]:
        """Every cache row that a request with n committed positions may still read, by leaf, in order of position."""
        tables = self.state.tables

        def pool(table: torch.Tensor, first: int, last: int, page: int, of: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(first, last)
            pages = table[slot][(positions // page) % table.shape[1]]
            return of[pages.long() * page + positions % page]

        found: dict[str, torch.Tensor] = {}
        first = max(0, n - self.cfg.sliding_window + 1)
        for i, layer in enumerate(self.cache.layers):
            found[f"{i}.kv"] = pool(tables.window, first, n, 32, layer.kv)
            if hasattr(layer, "index_keys"):
                tail = max(0, n // 4 * 4 - 4)
                for name in ("state", "index_state"):
                    found[f"{i}.{name}"] = pool(tables.tail, tail, n, 8, getattr(layer, name))
                for name in ("entries", "index_keys", "index_scale"):
                    if getattr(layer, name) is not None:
                        found[f"{i}.{name}"] = pool(tables.history, 0, n // 4, 32, getattr(layer, name))
            elif hasattr(layer, "state"):
                found[f"{i}.state"] = pool(tables.open, n // 128 * 128, n, 32, layer.state)
                found[f"{i}.entries"] = pool(tables.history, 0, n // 128, 1, layer.entries)
        for s, context in enumerate(self.cache.context):
            found[f"context.{s}"] = pool(tables.window, first, n, 32, context)
        return found
