"""Attention and index selection on an NPU, from gathers and batched products, and the fused lightning indexer where it fits.

Products of bf16 give float32 (`mm` and `bmm` with an `out_dtype`): the NPU's cube unit accumulates in float32 anyway, and
rounding scores would cost the selection its order.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.ops.plain import PAGE_HISTORY

TILE_TOKENS = 512  # queries whose keys are gathered at once: 640 rows of 1 KiB each are 320 MiB
HIDDEN = -1e30  # finite, so that a row without any key stays finite
ENTRIES_PER_PAGE = PAGE_HISTORY // 4
INDEXER_HEADS, INDEXER_DIM, INDEXER_TOPK = 64, 128, 2048  # limits of npu_quant_lightning_indexer


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, for float32 and bf16 operands."""
    if a.dtype == torch.float32:
        return a @ b
    return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)


def rows_of(pool: Tensor, rows: Tensor) -> Tensor:
    """[..., d]: pool rows by index, row 0 where the index is -1."""
    rows = rows.clamp(min=0)
    if pool.ndim == 2:
        return F.embedding(rows, pool)  # the one gather that takes indices of any rank
    return pool.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _repeat(x: Tensor, times: int) -> Tensor:
    """Every row `times` times."""
    return x if times == 1 else x.unsqueeze(1).expand(-1, times, *x.shape[1:]).flatten(0, 1)


def _bias(seen: Tensor) -> Tensor:
    return torch.where(seen, 0.0, HIDDEN)


def _window(rows: Tensor, query_len: int) -> tuple[Tensor, Tensor]:
    """Windows of consecutive queries overlap: their union [R, W+Q-1], and what each query hides of it, [R, Q, W+Q-1]."""
    tokens, width = rows.shape
    rows = rows.view(tokens // query_len, query_len, width)
    union = torch.cat([rows[:, 0], rows[:, 1:, -1]], 1)
    ahead = torch.arange(width + query_len - 1, device=rows.device) - torch.arange(
        query_len, device=rows.device
    ).unsqueeze(1)
    inside = (ahead >= 0) & (ahead < width)
    return union, _bias(inside & (union >= 0).unsqueeze(1))


def _scores(q: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """[T, H, n] = scale q k + bias; keys [B, n, d] serve T/B consecutive queries, bias [R, Q, n] or [B, n] lines up with T."""
    tokens, heads, d = q.shape
    dots = product(q.reshape(keys.shape[0], -1, d), keys.transpose(1, 2))
    bias = bias.reshape(-1, 1, bias.shape[-1])
    dots = dots.view(bias.shape[0], tokens // bias.shape[0] * heads, -1)
    return torch.add(bias, dots, alpha=scale).view(tokens, heads, -1)


def _values(weights: Tensor, keys: Tensor) -> Tensor:
    tokens, heads, n = weights.shape
    return product(weights.reshape(keys.shape[0], -1, n), keys).view(tokens, heads, -1)


def _tile(
    q: Tensor, kv: Tensor, kv_rows: Tensor, kv_bias: Tensor, entries: Tensor | None, entry_rows: Tensor | None,
    entry_bias: Tensor | None, sink: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    parts = [(rows_of(kv, kv_rows), kv_bias)]
    if entries is not None:
        parts.append((rows_of(entries, entry_rows), entry_bias))
    scores = [_scores(q, keys, bias, scale) for keys, bias in parts]
    sink = sink.view(-1, 1).expand(q.shape[0], -1, 1)
    weights = torch.cat([*scores, sink], 2).softmax(2).to(q.dtype)
    *weights, _ = weights.split([keys.shape[1] for keys, _ in parts] + [1], 2)
    return functools.reduce(torch.add, (_values(w, keys) for w, (keys, _) in zip(weights, parts, strict=True)))


def attend(
    q: Tensor,
    kv: Tensor,
    kv_rows: Tensor,
    entries: Tensor | None,
    entry_rows: Tensor | None,
    entry_count: Tensor | None,
    sink: Tensor,
    scale: float,
    query_len: int,
) -> Tensor:
    """`plain.attention` before its inverse rotation, float32 [T, H, d]. Probabilities are rounded after normalising."""
    tokens = q.shape[0]
    drafting = entries is not None and entry_count is None  # only the drafter's block counts all its entries
    if kv_rows.shape[0] == tokens and not drafting:
        kv_rows, kv_bias = _window(kv_rows, query_len)
    else:
        kv_bias = _bias(kv_rows >= 0)
    entry_bias = None
    if entries is not None:
        seen = entry_rows >= 0
        if entry_count is not None:
            first = torch.arange(seen.shape[1], device=q.device) < entry_count.unsqueeze(1)
            seen = seen.unsqueeze(1) & first.unflatten(0, (seen.shape[0], -1))  # [R or T, queries of a row, E]
        entry_bias = _bias(seen)

    def part(x: Tensor | None, first: int, last: int) -> Tensor | None:
        """The slice of a tensor with one leading index per one or several queries."""
        if x is None:
            return None
        per = tokens // x.shape[0]
        return x[first // per : last // per]

    outs = []
    for first in range(0, tokens, TILE_TOKENS):
        last = min(first + TILE_TOKENS, tokens)
        whole = (q, kv_rows, kv_bias, entry_rows, entry_bias)
        tq, tr, tb, er, eb = (part(x, first, last) for x in whole) if tokens > TILE_TOKENS else whole
        outs.append(_tile(tq, kv, tr, tb, entries, er, eb, sink, scale))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _entry_rows(history: Tensor) -> Tensor:
    """[R, 32 P]: pool rows of all entries a row's pages hold, in order."""
    within = torch.arange(ENTRIES_PER_PAGE, dtype=torch.int32, device=history.device)
    return (history.unsqueeze(-1) * ENTRIES_PER_PAGE + within).flatten(1)


def _moves(history: Tensor) -> Tensor:
    """[R, 1 + P]: what turns an entry's number into its pool row, by its page; in front a page that moves -1 nowhere."""
    pages = torch.arange(history.shape[1], dtype=torch.int32, device=history.device)
    return F.pad((history - pages) * ENTRIES_PER_PAGE, (1, 0))


def _fused(q, q_scale, weights, keys, key_scale, history, visible, topk: int) -> Tensor:
    """Entry numbers of the best `topk`, -1 behind. Every query is its own batch row with its own key length, so the
    kernel's causal mask, which knows no compression ratio, is not needed. Weights and scales travel as float16."""
    tokens, _, dim = q.shape
    half = torch.float16
    chosen = torch.ops.npu.npu_quant_lightning_indexer(
        q.unsqueeze(1), keys.view(-1, ENTRIES_PER_PAGE, 1, dim), weights.to(half).unsqueeze(1),
        q_scale.to(half).unsqueeze(1), key_scale.to(half).view(-1, ENTRIES_PER_PAGE, 1), 0, 0,
        actual_seq_lengths_key=visible, block_table=_repeat(history, tokens // history.shape[0]),
        layout_query="BSND", layout_key="PA_BSND", sparse_count=topk, sparse_mode=0,
    )  # fmt: skip
    return chosen.view(tokens, -1)


def _composed(q, q_scale, weights, keys, key_scale, rows, visible, topk: int) -> Tensor:
    """Entry numbers of the best `topk`; those not visible come last and are for the caller to hide."""
    gathered = rows_of(keys, rows).to(
        torch.bfloat16 if keys.dtype == torch.int8 else keys.dtype
    )  # int8 is exact in bf16
    dots = product(q.to(gathered.dtype).reshape(rows.shape[0], -1, q.shape[2]), gathered.transpose(1, 2))
    dots = torch.relu(dots.view(*q.shape[:2], -1))
    if q_scale is not None:
        weights = weights * q_scale  # both are per (token, head), and a positive factor passes through relu
    scores = product(weights.unsqueeze(1), dots).squeeze(1)
    times = q.shape[0] // rows.shape[0]
    if key_scale is not None:
        scores = scores * _repeat(rows_of(key_scale, rows), times)
    entry = torch.arange(rows.shape[1], dtype=torch.int32, device=q.device)
    scores = torch.where(entry < visible.unsqueeze(1), scores, HIDDEN)
    best = torch.topk(scores, topk, -1)[1]
    return torch.sort(best.to(torch.float32), -1)[0].to(torch.int32)  # entry numbers are exact in float32


def index_topk(
    q: Tensor,
    q_scale: Tensor | None,
    weights: Tensor,
    keys: Tensor,
    key_scale: Tensor | None,
    history: Tensor,
    visible: Tensor,
    topk: int,
    scale: float,
) -> Tensor:
    """See `plain.index_topk`. The fused kernel promises no order; attention needs none."""
    rows = _entry_rows(history)
    tokens, heads, dim = q.shape
    per_query = _repeat(rows, tokens // history.shape[0])
    if rows.shape[1] <= topk:  # every visible entry is chosen: no score is needed
        entry = torch.arange(rows.shape[1], dtype=torch.int32, device=q.device)
        return torch.where(entry < visible.unsqueeze(1), per_query, -1)
    fits = q_scale is not None and dim == INDEXER_DIM and heads <= INDEXER_HEADS and topk <= INDEXER_TOPK
    if fits:
        best = _fused(q, q_scale, weights * scale, keys, key_scale, history, visible, topk)
        page = torch.div(best + ENTRIES_PER_PAGE, ENTRIES_PER_PAGE, rounding_mode="floor")  # 0 for -1
        return best + torch.gather(_repeat(_moves(history), tokens // history.shape[0]), 1, page.long())
    best = _composed(q, q_scale, weights * scale, keys, key_scale, rows, visible, topk)
    return torch.where(best < visible.unsqueeze(1), torch.gather(per_query, 1, best.long()), -1)
