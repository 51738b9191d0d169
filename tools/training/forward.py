"""Whole sequences through the project's own model functions, with the training op set."""

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.batch import make_row_state
from dsv4.cache import PAGE_TOKENS, Cache, Pages, make_cache
from dsv4.config import ModelConfig
from dsv4.drafter.stages import Block, run_block, write_context
from dsv4.model.context import Env, StepContext, step_context
from dsv4.model.layer import logits
from dsv4.model.target import backbone
from dsv4.ops.plain import draft_addresses
from dsv4.params import Params
from tools.training.ops import TrainingOps


class Sequences:
    """B sequences of S tokens in an empty cache: one object per shape, reused for every batch of it."""

    def __init__(
        self, cfg: ModelConfig, rows: int, length: int, compute: torch.dtype = torch.bfloat16, *, select: bool = False
    ) -> None:
        self.ops = TrainingOps(rows, length, compute, select=select)
        self.env = Env(cfg=cfg, ops=self.ops.table())
        self.rows, self.length = rows, length
        self._widths = {group: -(-length // size) for group, size in PAGE_TOKENS.items()}
        self._at: StepContext | None = None

    def _context(self, params: Params, ids: Tensor) -> StepContext:
        if self._at is None:
            state = make_row_state(self.rows, self._widths, 0)
            for group, width in self._widths.items():
                pages = torch.arange(1, self.rows * width + 1, dtype=torch.int32)
                getattr(state.tables, group)[: self.rows] = pages.view(self.rows, width)
            slots = torch.arange(self.rows, dtype=torch.int32)
            full = torch.full_like(slots, self.length)
            self._at = step_context(
                self.env, state.tables, params.rope, slots, ids, full * 0, full, self._widths["history"]
            )
            self._tables = state.tables
        return replace(self._at, ids=ids.flatten())

    def _empty(self) -> Cache:
        # The training op set never reads a pool: a page of each is enough.
        return make_cache(self.env.cfg, Pages(history=1, window=1, tail=1, open=1), torch.float32, drafter=True)

    def target(self, params: Params, ids: Tensor) -> tuple[Tensor, list[Tensor], StepContext]:
        """Logits [B*S, V], tapped streams, and the step's context. Fills `ops.loads` and `ops.index_losses` anew."""
        self.ops.loads.clear()
        self.ops.index_losses.clear()
        at = self._context(params, ids)
        streams, taps, _ = backbone(self.env, params.target, self._empty(), at)
        target = params.target
        return logits(self.env, target.hc_head, target.norm, target.head, streams)[1], taps, at

    def blocks(
        self, params: Params, taps: list[Tensor], at: StepContext, anchors: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        """(h [R*k, D], base logits [R, k, V]) of draft blocks whose anchors are at `anchors` [B, n], all of them at once."""
        env, drafter, cfg = self.env, params.drafter, self.env.cfg
        self.ops.loads.clear()
        cache = write_context(env, drafter, self._empty(), taps, at)
        position = anchors.flatten().int()
        row = torch.arange(self.rows).repeat_interleave(anchors.shape[1])
        ids = at.ids.view(self.rows, -1)[row, position.long()]
        # Context row = row * length + position: what a window table of consecutive pages gives, less the null page.
        found = draft_addresses(
            ids, position, self._tables.window[row], k, cfg.sliding_window, cfg.dspark_noise_token_id
        )
        block_ids, positions, context_rows, own = found
        block = Block(
            ids=block_ids, positions=positions, rope=params.rope.plain[positions.long()],
            context_rows=torch.where(context_rows >= 0, context_rows - PAGE_TOKENS["window"], -1), own=own,
        )  # fmt: skip
        streams = run_block(env, drafter, params.target.embed, cache, block)
        h, base = logits(env, drafter.hc_head, drafter.norm, params.target.head, streams)
        return h, base.unflatten(0, (-1, k))
