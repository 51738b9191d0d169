"""The public surface: whole-sequence calls over the serving programs, for research and for tests."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.batch import PrefillBatch, RowState, Tables, make_row_state
from dsv4.cache import PAGE_TOKENS, Cache, Pages, make_cache
from dsv4.config import ModelConfig
from dsv4.drafter.heads import block_logits, chain
from dsv4.drafter.stages import write_context
from dsv4.errors import RequestError
from dsv4.model.context import Env, StepContext, step_context
from dsv4.model.layer import logits
from dsv4.model.target import backbone
from dsv4.ops.cpu import default_ops
from dsv4.ops.table import OpSet
from dsv4.params import Params, act_dtype

TILE = 128


@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """logits f32 [S, V]; taps f32 [S, 3D], the drafter's input (empty without draft stages in the config)."""

    logits: Tensor
    taps: Tensor


@dataclass(frozen=True, kw_only=True)
class ProposeOutput:
    """tokens int32 [k]; logits f32 [k, V] with the Markov bias; confidence f32 [k]."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


def _check(cfg: ModelConfig, params: Params, token_ids: Any, room: int) -> Tensor:
    ids = torch.as_tensor(token_ids, dtype=torch.int32)
    if ids.ndim != 1 or not len(ids):
        raise RequestError(f"token_ids: expected a non-empty list of ids, got shape {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= cfg.vocab_size:
        raise RequestError(f"token_ids: ids must lie in 0..{cfg.vocab_size - 1}, got {ids.min()}..{ids.max()}")
    positions = params.rope.plain.shape[0]
    if len(ids) + room > positions:
        raise RequestError(f"token_ids: {len(ids)} tokens, but params hold positions for {positions - room}")
    return ids


def _lone_request(cfg: ModelConfig, params: Params, tokens: int, dtype: torch.dtype) -> tuple[Cache, RowState]:
    """A cache and a row state in which slot 0 owns pages for `tokens` positions, in order."""
    pages = {group: math.ceil(tokens / size) for group, size in PAGE_TOKENS.items()}
    cache = make_cache(
        cfg, Pages(**{g: n + 1 for g, n in pages.items()}), dtype, drafter=params.drafter is not None
    )  # fmt: skip
    state = make_row_state(1, pages, drafts=0)
    for group, count in pages.items():
        getattr(state.tables, group)[0] = torch.arange(1, count + 1, dtype=torch.int32)
    return cache, state


def prompt_batch(ids: Tensor, slot: int, dummy: int) -> PrefillBatch:
    """A whole prompt as tiles of one slot."""
    rows = math.ceil(len(ids) / TILE)
    padded = torch.zeros(rows * TILE, dtype=torch.int32)
    padded[: len(ids)] = ids
    start = torch.arange(0, rows * TILE, TILE, dtype=torch.int32)
    length = (len(ids) - start).clamp(max=TILE)
    full = torch.full_like(start, slot)
    zero = torch.zeros_like(start)
    return PrefillBatch(
        slots=full, start=start, length=length, ids=padded.view(rows, TILE), last=start + length - 1,
        final=torch.full_like(start, dummy), limit=zero, eos=zero - 1,
    )  # fmt: skip


def _run(env: Env, params: Params, ids: Tensor) -> tuple[Tensor, list[Tensor], Cache, Tables, StepContext]:
    cache, state = _lone_request(env.cfg, params, len(ids) + 1, act_dtype(params))
    b = prompt_batch(ids, 0, 1)
    at = step_context(env, state.tables, params.rope, b.slots, b.ids, b.start, b.length, state.tables.history.shape[1])
    streams, taps, cache = backbone(env, params.target, cache, at)
    return streams, taps, cache, state.tables, at


@torch.no_grad()
def forward(cfg: ModelConfig, params: Params, token_ids: Any, *, ops: OpSet | None = None) -> ForwardOutput:
    """Logits after every token of one sequence: the serving prefill into an empty cache.

    With float params nothing is quantised; with W8A8 params the int8 sites of model.md section 9 are. Raises RequestError.
    """
    ids = _check(cfg, params, token_ids, 0)
    env = Env(cfg=cfg, ops=ops or default_ops())
    streams, taps, *_ = _run(env, params, ids)
    target = params.target
    _, scores = logits(env, target.hc_head, target.norm, target.head, streams)
    tapped = env.ops.taps(taps)[: len(ids)] if taps else scores.new_zeros(len(ids), 0)
    return ForwardOutput(logits=scores[: len(ids)], taps=tapped)


@torch.no_grad()
def propose(cfg: ModelConfig, params: Params, token_ids: Any, k: int = 7, *, ops: OpSet | None = None) -> ProposeOutput:
    """The k drafts that follow the committed ids, whose last one is the anchor (drafter.md section 4).

    Raises RequestError for fewer than two ids, or params loaded without the drafter.
    """
    ids = _check(cfg, params, token_ids, k)
    if params.drafter is None:
        raise RequestError("propose needs draft stages: load_params(..., drafter=True)")
    if len(ids) < 2:
        raise RequestError("token_ids: expected at least one context token and the anchor")
    if k < 1:
        raise RequestError(f"k: expected at least 1, got {k}")
    env = Env(cfg=cfg, ops=ops or default_ops())
    _, taps, cache, tables, at = _run(env, params, ids[:-1])
    cache = write_context(env, params.drafter, cache, taps, at)
    slot, anchor, position = (
        torch.zeros(1, dtype=torch.int32),
        ids[-1:],
        torch.tensor([len(ids) - 1], dtype=torch.int32),
    )
    h, base = block_logits(env, params, cache, tables, slot, anchor, position, k)
    tokens = env.ops.markov(base, params.drafter.markov_w1, params.drafter.markov_w2, anchor)
    scores, confidence = chain(env, params.drafter, h, base, anchor, tokens)
    return ProposeOutput(tokens=tokens[0], logits=scores[0], confidence=confidence[0])
