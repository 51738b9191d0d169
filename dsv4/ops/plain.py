"""The named operators, as plain PyTorch: this file is their definition.

Conventions of every form (plain, cpu, npu):

* `T = R * Q` flat tokens: R rows (requests, or tiles of a prompt) of Q consecutive positions. A tensor with leading size R
  where T is expected holds for all Q tokens of the row.
* Activations are float32 between operators unless a docstring says otherwise. An operator rounds an activation to the dtype
  of the weight or cache it meets: with bf16 weights that is the W8A8 numerics of model.md section 9, with float weights it
  is no rounding at all. Products accumulate in float32, int8 products exactly.
* Indices are int32. A pool row index of -1 means "nothing there". Writes that must not happen go to rows of page 0 of a
  pool (the null page), which nothing ever reads.
* Position -1 marks a padding token: its results are undefined but finite, and it changes nothing else.
* Operators under "Writes:" change their argument in place (it is donated) and return it.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from dsv4.ops.plain_state import (  # noqa: F401  (one table: these are operators too)
    PAGE_HISTORY,
    accept,
    addresses,
    begin,
    commit,
    draft_addresses,
    scatter,
    take,
    write_state,
)
from dsv4.tree import QuantWeight

# ---- embeddings, norms, rope ------------------------------------------------------------------------------------------


def embed(ids: Int[Tensor, " T"], table: Float[Tensor, "V D"], streams: int) -> Float[Tensor, "T M D"]:
    """Token embeddings copied to the `streams` residual streams, float32."""
    return table[ids.long()].float().unsqueeze(1).repeat(1, streams, 1)


def rms_norm(x: Float[Tensor, "T D"], gamma: Float[Tensor, " D"], eps: float) -> Float[Tensor, "T D"]:
    """x * rsqrt(mean(x^2) + eps) * gamma in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma.float()


def rope(
    x: Float[Tensor, "T H d"],
    cos_sin: Float[Tensor, "T r"],
    gamma: Float[Tensor, " d"] | None,
    eps: float | None,
    dtype: torch.dtype,
) -> Float[Tensor, "T H d"]:
    """Norm over d (weighted if `gamma`, none if `eps` is None), then rotates the trailing r channels; result in `dtype`.

    Interleaved pairs: (a, b) -> (a cos - b sin, a sin + b cos); cos_sin = cos | sin, r/2 each (model.md sections 2, 3).
    """
    x = x.float()
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if gamma is not None:
        x = x * gamma.float()
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, -1)
    keep, turn = x.split([x.shape[-1] - cos_sin.shape[-1], cos_sin.shape[-1]], -1)
    a, b = turn[..., 0::2], turn[..., 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([keep, turned], -1).to(dtype)


# ---- matrix products --------------------------------------------------------------------------------------------------


def quantise(x: Float[Tensor, "... K"]) -> tuple[Int[Tensor, "... K"], Float[Tensor, "... 1"]]:
    """Per-row symmetric int8 (model.md section 9): q = round_half_even(x * 127/max(amax, 1e-4)), and the factor back."""
    amax = x.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    return torch.round(x * (127.0 / amax)).to(torch.int8), amax / 127.0


def _int8_dot(q: Int[Tensor, "... M K"], w: Int[Tensor, "... N K"]) -> Float[Tensor, "... M N"]:
    # float64 is exact for sums of int8 products up to K = 2^39, and has a fast product everywhere.
    return (q.double() @ w.double().transpose(-1, -2)).float()


def linear(x: Float[Tensor, "T K"], w: Float[Tensor, "N K"] | QuantWeight, groups: int = 1) -> Float[Tensor, "T N"]:
    """x w^T in float32. A QuantWeight quantises x per (token, group of K/groups channels) and sums groups in order."""
    if not isinstance(w, QuantWeight):
        return x.to(w.dtype).float() @ w.float().T
    total = None
    for part, values in zip(x.float().chunk(groups, -1), w.values.chunk(groups, -1), strict=True):
        q, scale = quantise(part)
        product = _int8_dot(q, values) * scale
        total = product if total is None else total + product
    return total * w.scale


def grouped_linear(x: Float[Tensor, "T G K"], w: Float[Tensor, "G N K"]) -> Float[Tensor, "T G N"]:
    """One matrix per group: out[t, g] = x[t, g] w[g]^T in float32."""
    return torch.einsum("tgk,gnk->tgn", x.to(w.dtype).float(), w.float())


# ---- hyper-connections (model.md section 1) -----------------------------------------------------------------------------


def _mix_logits(streams: Float[Tensor, "T M D"], fn: Float[Tensor, "C MD"], eps: float) -> Float[Tensor, "T C"]:
    flat = streams.flatten(1)
    return (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def hc_pre(
    streams: Float[Tensor, "T M D"],
    fn: Float[Tensor, "C MD"],
    base: Float[Tensor, " C"],
    scale: Float[Tensor, " 3"],
    gamma: Float[Tensor, " D"],
    iters: int,
    eps: float,
    hc_eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T M"], Float[Tensor, "T M M"]]:
    """A sublayer's normed input, and the weights `post`, `comb` that will put its output back.

    The collapsed stream is rounded to gamma's dtype before the norm; the normed result is not rounded.
    comb rows are input streams, columns output streams; Sinkhorn starts and ends with columns.
    """
    m = streams.shape[1]
    mix = _mix_logits(streams, fn, eps)
    pre = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + hc_eps
    post = 2 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (mix[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    x = (pre.unsqueeze(-1) * streams).sum(1)
    return rms_norm(x.to(gamma.dtype), gamma, eps), post, comb


def hc_post(
    streams: Float[Tensor, "T M D"], y: Float[Tensor, "T D"], post: Float[Tensor, "T M"], comb: Float[Tensor, "T M M"]
) -> Float[Tensor, "T M D"]:
    """X'_o = post_o y + sum_i comb[i, o] X_i: the sum runs over the first index of comb."""
    return post.unsqueeze(-1) * y.float().unsqueeze(1) + comb.transpose(1, 2) @ streams


def hc_head(
    streams: Float[Tensor, "T M D"],
    fn: Float[Tensor, "M MD"],
    base: Float[Tensor, " M"],
    scale: Float[Tensor, " 1"],
    gamma: Float[Tensor, " D"],
    eps: float,
    hc_eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """(h, norm(h)): the streams collapsed before a head. h is rounded to gamma's dtype, kept in float32."""
    pre = torch.sigmoid(_mix_logits(streams, fn, eps) * scale + base) + hc_eps
    h = (pre.unsqueeze(-1) * streams).sum(1).to(gamma.dtype).float()
    return h, rms_norm(h, gamma, eps)


def taps(streams: Sequence[Float[Tensor, "T M D"]]) -> Float[Tensor, "T nD"]:
    """Plain means over the streams of several layers, side by side: the drafter's input (drafter.md section 1)."""
    return torch.cat([x.mean(1) for x in streams], 1)


# ---- compression and attention (model.md sections 2, 4, 5, 6) -----------------------------------------------------------


def compress(
    state: Float[Tensor, "N C2"],
    rows: Int[Tensor, "n m"],
    gamma: Float[Tensor, " d"],
    cos_sin: Float[Tensor, "n r"],
    eps: float,
    dtype: torch.dtype,
) -> Float[Tensor, "n d"]:
    """Pools the m state rows of each closing window into one entry: softmax over tokens per channel, norm, rope.

    With overlap (C = 2d: CSA) the first half of the rows gives its a channels, the second half its b channels.
    Row -1 has weight 0 (before the first token).
    """
    d, m = gamma.shape[0], rows.shape[1]
    picked = state[rows.clamp(min=0).long()]
    values, gates = picked.chunk(2, -1)
    if values.shape[-1] == 2 * d:
        values, gates = (torch.cat([x[:, : m // 2, :d], x[:, m // 2 :, d:]], 1) for x in (values, gates))
    gates = torch.where(rows.unsqueeze(-1) >= 0, gates, -torch.inf)
    weights = torch.where((rows >= 0).any(1)[:, None, None], gates, 0.0).softmax(1)
    entry = (weights * values).sum(1)
    return rope(entry.unsqueeze(1), cos_sin, gamma, eps, dtype).squeeze(1)


def hadamard_quantise(x: Float[Tensor, "T H d"]) -> tuple[Int[Tensor, "T H d"], Float[Tensor, "T H"]]:
    """Index queries and keys in W8A8: bf16, normalised Sylvester-Hadamard, bf16, int8 per (token, head)."""
    x = x.bfloat16().float()
    d = x.shape[-1]
    half = 1
    while half < d:
        pairs = x.unflatten(-1, (d // (2 * half), 2, half))
        a, b = pairs.unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    values, scale = quantise((x * d**-0.5).bfloat16().float())
    return values, scale.squeeze(-1)


def index_topk(
    q: Shaped[Tensor, "T H d"],
    q_scale: Float[Tensor, "T H"] | None,
    weights: Float[Tensor, "T H"],
    keys: Shaped[Tensor, "N d"],
    key_scale: Float[Tensor, " N"] | None,
    history: Int[Tensor, "R P"],
    visible: Int[Tensor, " T"],
    topk: int,
    scale: float,
) -> Int[Tensor, "T k"]:
    """Pool rows of the top min(topk, visible) entries in ascending entry order, then -1; k = min(topk, 32 P).

    score[t, w] = sum_h scale * weights[t, h] * relu(q[t, h] . keys[w]); int8 operands carry their scales. Ties at the cut go
    to the lowest entry.
    """
    per_page = PAGE_HISTORY // 4
    entries = torch.arange(history.shape[1] * per_page, dtype=torch.int32, device=q.device)
    rows = rearrange(history.unsqueeze(-1) * per_page + entries[:per_page], "r p e -> r (p e)")
    tokens = q.shape[0] // history.shape[0]
    k = keys[rows.long()].float()
    dots = torch.einsum("rqhd,red->rqhe", q.float().unflatten(0, (-1, tokens)), k).flatten(0, 1)
    if q_scale is not None:
        dots = dots * q_scale.unsqueeze(-1)
    scores = (torch.relu(dots) * (weights * scale).unsqueeze(-1)).sum(1)
    rows = rows.repeat_interleave(tokens, 0)
    if key_scale is not None:
        scores = scores * key_scale[rows.long()]
    scores = torch.where(entries < visible.unsqueeze(1), scores, -torch.inf)
    k = min(topk, entries.shape[0])
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
    # With fewer than k visible entries the cut also took invisible ones; those lie behind every visible one.
    return torch.where(best < visible.unsqueeze(1), rows.gather(1, best), -1).to(torch.int32)


def attention(
    q: Float[Tensor, "T H d"],
    kv: Float[Tensor, "N d"],
    kv_rows: Int[Tensor, "_ W"],
    entries: Float[Tensor, "M d"] | None,
    entry_rows: Int[Tensor, "_ E"] | None,
    entry_count: Int[Tensor, " T"] | None,
    sink: Float[Tensor, " H"],
    cos_sin: Float[Tensor, "T r"],
    scale: float,
) -> Float[Tensor, "T H d"]:
    """Each query over its kv rows and its first `entry_count` entries, one softmax with a sink; rotated back at the end.

    Keys are values. q, kv, entries and the result share a dtype; scores, softmax and sums are float32, probabilities are
    rounded to that dtype before the product with values. `kv_rows` and `entry_rows` lead with T or R; -1 is unused.
    entry_count None counts them all.
    """

    def gather(pool: Tensor, rows: Tensor) -> Tensor:
        picked = pool[rows.clamp(min=0).long()].float()
        return picked.repeat_interleave(q.shape[0] // rows.shape[0], 0)

    keys, seen = gather(kv, kv_rows), (kv_rows >= 0).repeat_interleave(q.shape[0] // kv_rows.shape[0], 0)
    if entries is not None:
        keys = torch.cat([keys, gather(entries, entry_rows)], 1)
        given = (entry_rows >= 0).repeat_interleave(q.shape[0] // entry_rows.shape[0], 0)
        if entry_count is not None:
            given = given & (torch.arange(entry_rows.shape[1], device=q.device) < entry_count.unsqueeze(1))
        seen = torch.cat([seen, given], 1)
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * scale
    scores = torch.where(seen.unsqueeze(1), scores, -torch.inf)
    top = torch.maximum(scores.amax(-1), sink).unsqueeze(-1)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - top)
    out = torch.einsum("thk,tkd->thd", weights.to(q.dtype).float(), keys) / total
    cos, sin = cos_sin.chunk(2, -1)
    return rope(out, torch.cat([cos, -sin], -1), None, None, q.dtype)


# ---- mixture of experts (model.md section 7) ----------------------------------------------------------------------------


def _route_weights(scores: Tensor, ids: Tensor, scale: float, positions: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores.gather(1, ids.long())
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    return torch.where(positions.unsqueeze(1) >= 0, ids, -1).to(torch.int32), weights


def _affinity(x: Float[Tensor, "T D"], gate: Float[Tensor, "E D"]) -> Float[Tensor, "T E"]:
    return F.softplus(x @ gate.T).sqrt()  # linear above 20, where exp would round it away


def route(
    x: Float[Tensor, "T D"],
    gate: Float[Tensor, "E D"],
    bias: Float[Tensor, " E"],
    positions: Int[Tensor, " T"],
    k: int,
    scale: float,
) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]:
    """Expert ids by score + bias, best first (ties: lowest id), weights from the unbiased scores. Padding gets id -1."""
    scores = _affinity(x, gate)
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return _route_weights(scores, ids, scale, positions)


def route_hash(
    x: Float[Tensor, "T D"],
    gate: Float[Tensor, "E D"],
    tid2eid: Int[Tensor, "V k"],
    ids: Int[Tensor, " T"],
    positions: Int[Tensor, " T"],
    scale: float,
) -> tuple[Int[Tensor, "T k"], Float[Tensor, "T k"]]:
    """Expert ids looked up by the token of the row; weights as in `route`. Padding gets id -1."""
    return _route_weights(_affinity(x, gate), tid2eid[ids.clamp(min=0).long()], scale, positions)


def _expert(x: Tensor, w13: Tensor | QuantWeight, w2: Tensor | QuantWeight, weight: Tensor, limit: float) -> Tensor:
    """One expert on its rows; in W8A8 the routing weight is folded into the dequantisation scale and the result is bf16."""
    gate, up = linear(x, w13).chunk(2, -1)
    h = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if not isinstance(w2, QuantWeight):
        return linear(h, w2) * weight
    q, scale = quantise(h)
    return (_int8_dot(q, w2.values) * (scale * weight) * w2.scale).bfloat16().float()


def moe(
    x: Float[Tensor, "T D"],
    ids: Int[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    w13: Float[Tensor, "E1 F2 D"] | QuantWeight,
    w2: Float[Tensor, "E1 D F"] | QuantWeight,
    limit: float,
    first: int,
) -> Float[Tensor, "T D"]:
    """sum_k weights[t, k] expert_{ids[t, k]}(x_t) in slot order, then + shared(x_t); E1 - 1 local experts from id `first`, the
    shared one last. Ids of other ranks contribute nothing; a row whose ids are all -1 (padding) gives 0. W8A8: each route
    and the sum are rounded to bf16.
    """

    def pick(w: Tensor | QuantWeight, e: int) -> Tensor | QuantWeight:
        return QuantWeight(values=w.values[e], scale=w.scale[e]) if isinstance(w, QuantWeight) else w[e]

    last = w13.shape[0] - 1
    one = torch.ones_like(weights[:, :1])
    routes = [torch.zeros_like(x) for _ in range(ids.shape[1])]
    for e in range(last):
        for slot, hit in enumerate((ids == first + e).unbind(1)):
            token = hit.nonzero().squeeze(1)
            if token.numel():
                part = _expert(x[token], pick(w13, e), pick(w2, e), weights[token, slot, None], limit)
                routes[slot] = routes[slot].index_put((token,), part)
    y = torch.where((ids >= 0).any(1, keepdim=True), _expert(x, pick(w13, last), pick(w2, last), one, limit), 0.0)
    y = sum(routes) + y
    return y.bfloat16().float() if isinstance(w2, QuantWeight) else y


# ---- tokens -------------------------------------------------------------------------------------------------------------


def argmax(logits: Float[Tensor, "n V"]) -> Int[Tensor, " n"]:
    """The lowest id of the greatest logit."""
    best = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1]).amin(-1).clamp(max=logits.shape[-1] - 1).to(torch.int32)


def markov(
    base: Float[Tensor, "R k V"], w1: Float[Tensor, "V m"], w2: Float[Tensor, "V m"], anchor: Int[Tensor, " R"]
) -> Int[Tensor, "R k"]:
    """The greedy draft chain: x_j = argmax(base_j + w2 w1[x_{j-1}]), x_{-1} = anchor (drafter.md section 4)."""
    tokens = []
    for step in base.unbind(1):
        anchor = argmax(step + linear(take(w1, anchor), w2))
        tokens.append(anchor)
    return torch.stack(tokens, 1)
