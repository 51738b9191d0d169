"""Every program a server runs: pure functions (params, cache, state, batch) -> (output, cache, state).

    prefill     tiles of prompts; a tile that ends its prompt yields the first token and opens its slot
    decode      K = 0: one row per slot
    speculate   K > 0: verify the anchor and K drafts, accept, write the drafter's context, draft the next K
    seed        K > 0: the first drafts of slots whose prefill has just ended

Cache and state are donated. Slots, positions, anchors, drafts and limits stay on the device: the host names slots and reads
tokens one step behind. Each function below is made for one `StepShape` and closes over it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.batch import PrefillBatch, RowBatch, RowState, SeedOutput, StepOutput
from dsv4.cache import Cache
from dsv4.config import StepShape
from dsv4.drafter.heads import propose
from dsv4.drafter.stages import write_context
from dsv4.model.choose import choose
from dsv4.model.context import Env, step_context
from dsv4.model.target import backbone
from dsv4.params import Params

StepFn = Callable[[Params, Cache, RowState, Any], tuple[StepOutput | SeedOutput, Cache, RowState]]


def prefill(env: Env, shape: StepShape) -> StepFn:
    """Tiles of prompts (PrefillBatch). With a drafter, its context rows are written for every token, so the drafter sees the
    same context whatever the chunking, and after a prefix hit."""

    def step(params: Params, cache: Cache, state: RowState, batch: PrefillBatch) -> tuple[StepOutput, Cache, RowState]:
        ops, b = env.ops, batch
        at = step_context(env, state.tables, params.rope, b.slots, b.ids, b.start, b.length, shape.pages)
        streams, taps, cache = backbone(env, params.target, cache, at)
        if params.drafter is not None:
            cache = write_context(env, params.drafter, cache, taps, at)
        greedy, scores = choose(env, params, ops.take(streams, b.last), b.extras)
        # A tile with a limit is final and yields its one token; the anchor then sits one past the last position.
        tokens, count, ended, _ = ops.accept(b.ids[:, :1], greedy.unsqueeze(1), b.limit, b.eos)
        state = replace(
            state,
            position=ops.scatter(state.position, b.final, ops.take(at.positions, b.last)),
            limit=ops.scatter(state.limit, b.final, b.limit),
            eos=ops.scatter(state.eos, b.final, b.eos),
        )
        ops.commit(b.final, tokens, count, ended, state.anchor, state.position, state.limit)
        return StepOutput(tokens=tokens, count=count, proposed=count, scores=scores), cache, state

    return step


def _draft(env: Env, params: Params, cache: Cache, state: RowState, slots: Tensor) -> tuple[Tensor, RowState]:
    ops, k = env.ops, state.drafts.shape[1]
    anchor, position = ops.take(state.anchor, slots), ops.take(state.position, slots)
    drafts = propose(env, params, cache, state.tables, slots, anchor, position, k)
    return drafts, replace(state, drafts=ops.scatter(state.drafts, slots, drafts))


def verify(env: Env, shape: StepShape) -> StepFn:
    """`decode` (query_len 1) and `speculate` (query_len K+1): run the anchor and its drafts, keep the longest right prefix plus
    the target's own token, and draft again from there."""

    def step(params: Params, cache: Cache, state: RowState, batch: RowBatch) -> tuple[StepOutput, Cache, RowState]:
        ops, slots, drafts = env.ops, batch.slots, None
        if batch.extras is not None:
            own = ops.take(state.drafts, slots)
            given = torch.where(batch.extras.drafts >= 0, batch.extras.drafts, own)
            state = replace(state, drafts=ops.scatter(state.drafts, slots, given))
        ids, start, length = ops.begin(slots, state.anchor, state.drafts, state.position, state.limit, shape.query_len)
        at = step_context(env, state.tables, params.rope, slots, ids, start, length, shape.pages)
        streams, taps, cache = backbone(env, params.target, cache, at)
        greedy, scores = choose(env, params, streams, batch.extras)
        eos = ops.take(state.eos, slots)
        tokens, count, ended, proposed = ops.accept(ids, greedy.view(ids.shape), length, eos)
        ops.commit(slots, tokens, count, ended, state.anchor, state.position, state.limit)
        if params.drafter is not None:
            cache = write_context(env, params.drafter, cache, taps, at)
            if shape.query_len > 1:
                drafts, state = _draft(env, params, cache, state, slots)
        out = StepOutput(tokens=tokens, count=count, proposed=proposed, drafts=drafts, scores=scores)
        return out, cache, state

    return step


def seed(env: Env, shape: StepShape) -> StepFn:
    """First drafts: the context rows are there since prefill, the anchor is its token."""

    def step(params: Params, cache: Cache, state: RowState, batch: RowBatch) -> tuple[SeedOutput, Cache, RowState]:
        drafts, state = _draft(env, params, cache, state, batch.slots)
        return SeedOutput(drafts=drafts), cache, state

    return step


STEPS = {"prefill": prefill, "decode": verify, "speculate": verify, "seed": seed}
