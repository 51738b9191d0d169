"""The op set of training: the operators of `dsv4.ops.plain` on whole sequences in an empty cache, fast enough to train with.

Same results (tests hold both against each other), but every tensor is dense: B sequences of S tokens fill a fresh cache in order,
so a pool after its write *is* the rows written, windows are tiles, and nothing is gathered. Products run in `compute` (bf16 is
several times faster on CPUs that have it) with float32 results. `Int8Site` matrices round their input as W8A8 does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.ops import plain
from dsv4.ops.table import OpSet, op_set
from tools.training.functions import RoundInt8, SinkAttention, Sinkhorn, compiled
from tools.training.weights import Int8Site

WINDOW = TILE = 128


def _matmul(x: Tensor, w: Tensor, compute: torch.dtype) -> Tensor:
    return (x.to(compute) @ w.to(compute).transpose(-1, -2)).float()


_rms_norm, _rope = compiled(plain.rms_norm), compiled(plain.rope)


@compiled
def _enter(streams, product, base, scale, gamma, eps, hc_eps) -> tuple[Tensor, Tensor, Tensor]:
    """Normed input, `post` and the logits of `comb`, from streams [T, M, D] and their product with fn [T, C]."""
    m = streams.shape[1]
    mix = product * torch.rsqrt(streams.flatten(1).square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(mix[:, :m] * scale[0] + base[:m]) + hc_eps
    post = 2 * torch.sigmoid(mix[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    x = plain.rms_norm((pre.unsqueeze(-1) * streams).sum(1), gamma, eps)
    return x, post, (mix[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m))


@compiled
def _leave(streams, y, post, comb) -> Tensor:
    mixed = sum(comb[:, i, :, None] * streams[:, i, None] for i in range(streams.shape[1]))
    return post.unsqueeze(-1) * y.unsqueeze(1) + mixed


@compiled
def _activate(h: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(dtype)


class TrainingOps:
    """Operators for B x S tokens. Besides results they collect, in layer order, what the losses need:

    `loads`: tokens per expert of each learned router; `index_losses`: KL of the indexer's scores to the attention mass on entries.
    """

    def __init__(self, rows: int, length: int, compute: torch.dtype, *, select: bool) -> None:
        if length % TILE:
            raise ValueError(f"sequences of {length} tokens; expected a multiple of {TILE}")
        self.rows, self.length, self.compute, self.select = rows, length, compute, select
        self.loads: list[Tensor] = []
        self.index_losses: list[Tensor] = []
        query = torch.arange(length).view(-1, TILE, 1)
        key = query[:, :1] - TILE + torch.arange(2 * TILE)
        self._window = (key >= 0) & (key <= query) & (query - key < WINDOW)  # [tiles, TILE, 2 TILE]
        self._visible = {
            ratio: torch.arange(length // ratio) < torch.div(query + 1, ratio, rounding_mode="floor")
            for ratio in (4, 128)
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(plain, name)  # what is not redefined here is fast enough as it is

    def table(self) -> OpSet:
        return op_set("training", self)

    # ---- products -----------------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, w: Tensor | Int8Site, groups: int = 1) -> Tensor:
        if isinstance(w, Int8Site):
            x, w = RoundInt8.apply(x.unflatten(-1, (groups, -1))).flatten(-2), w.weight
        return _matmul(x, w, self.compute)

    def grouped_linear(self, x: Tensor, w: Tensor) -> Tensor:
        return _matmul(x.transpose(0, 1), w, self.compute).transpose(0, 1)

    def hc_pre(self, streams, fn, base, scale, gamma, iters, eps, hc_eps):
        product = _matmul(streams.flatten(1), fn, self.compute)
        x, post, logits = _enter(streams, product, base, scale, gamma, eps, hc_eps)
        return x, post, Sinkhorn.apply(logits, iters, hc_eps)

    def hc_post(self, streams, y, post, comb):
        return _leave(streams, y, post, comb)

    def rms_norm(self, x, gamma, eps):
        return _rms_norm(x, gamma, eps)

    def rope(self, x, cos_sin, gamma, eps, dtype):
        return _rope(x, cos_sin, gamma, eps, dtype)

    # ---- caches: a fresh pool after its write is the rows written -------------------------------------------------------

    def scatter(self, pool: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        return rows

    def write_state(self, pool: Tensor, slots: Tensor, rows: Tensor, ape: Tensor, positions: Tensor) -> Tensor:
        values, gates = rows.unflatten(0, (-1, ape.shape[0])).chunk(2, -1)
        return torch.cat([values, gates + ape], -1).flatten(0, 1)

    def compress(self, state, rows, gamma, cos_sin, eps, dtype):
        d, width = gamma.shape[0], state.shape[1]
        overlap = width == 4 * d
        ratio = 4 if overlap else 128
        values, gates = state.view(self.rows, self.length // ratio, ratio, width).chunk(2, -1)
        if overlap:  # the a half of the previous window, the b half of this one

            def pair(x: Tensor, first: float) -> Tensor:
                before = F.pad(x[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=first)
                return torch.cat([before, x[..., d:]], 2)

            values, gates = pair(values, 0.0), pair(gates, -torch.inf)
        entry = (gates.softmax(2) * values).sum(2).flatten(0, 1)
        return _rope(entry.unsqueeze(1), cos_sin, gamma, eps, dtype).squeeze(1)

    # ---- attention ------------------------------------------------------------------------------------------------------

    def index_topk(self, q, q_scale, weights, keys, key_scale, history, visible, topk, scale) -> Tensor | None:
        """Scores f32 [B, S, E], -inf where invisible or not selected; None before selection is trained."""
        if not self.select:
            return None
        rows, heads = self.rows, q.shape[1]
        dots = torch.bmm(
            q.reshape(rows, -1, q.shape[2]).to(self.compute), keys.view(rows, -1, keys.shape[1]).to(self.compute).mT
        )
        dots = torch.relu(dots).unflatten(1, (self.length, heads))
        scores = torch.einsum("bshe,bsh->bse", dots, (weights * scale).view(rows, self.length, heads).to(self.compute))
        scores = scores.float().masked_fill(~self._visible[4].flatten(0, 1), -torch.inf)
        if topk < scores.shape[-1]:
            kept = scores.detach().topk(topk, -1).indices
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).scatter_(2, kept, False), -torch.inf)
        return scores

    def _keys(self, kv: Tensor, entries: Tensor | None) -> Tensor:
        """Per tile its 256 window rows and all entries of its sequence, [B * tiles, keys, d]."""
        tiles = F.pad(kv.view(self.rows, -1, TILE, kv.shape[1]), (0, 0, 0, 0, 1, 0))
        keys = torch.cat([tiles[:, :-1], tiles[:, 1:]], 2)
        if entries is not None:
            per_row = entries.view(self.rows, 1, -1, kv.shape[1])
            keys = torch.cat([keys, per_row.expand(-1, keys.shape[1], -1, -1)], 2)
        return keys.flatten(0, 1)

    def attention(self, q, kv, kv_rows, entries, entry_rows, entry_count, sink, cos_sin, scale) -> Tensor:
        if entries is not None and entry_count is None:
            return self._block(q, kv, kv_rows, entries, sink, cos_sin, scale)
        tiles, heads, d = self.length // TILE, q.shape[1], q.shape[2]
        seen = self._window.expand(self.rows, -1, -1, -1)
        scores = None
        if entries is not None:
            ratio = kv.shape[0] // entries.shape[0]
            given = self._visible[ratio].expand(self.rows, -1, -1, -1)
            if ratio == 4 and entry_rows is not None:
                scores = entry_rows.view(self.rows, tiles, TILE, -1)
                given = scores > -torch.inf
            seen = torch.cat([seen, given], -1)
        grouped = q.reshape(self.rows * tiles, TILE, heads, d)
        out, weights = SinkAttention.apply(
            grouped, self._keys(kv, entries), seen.flatten(0, 1), sink, scale, self.compute
        )
        if scores is not None:
            self.index_losses.append(_index_loss(scores.flatten(0, 1), weights[..., 2 * TILE :]))
        return _rotate_back(out.reshape(-1, heads, d), cos_sin)

    def _block(self, q, context, context_rows, own, sink, cos_sin, scale) -> Tensor:
        """Drafter: R blocks of K rows; all K see the same context rows and the whole block."""
        anchors, width = context_rows.shape
        keys = context.index_select(0, context_rows.clamp(min=0).flatten().long()).view(anchors, width, -1)
        keys = torch.cat([keys, own.view(anchors, -1, own.shape[1])], 1)
        block = keys.shape[1] - width
        seen = F.pad(context_rows >= 0, (0, block), value=True).unsqueeze(1).expand(-1, block, -1)
        out, _ = SinkAttention.apply(q.view(anchors, block, *q.shape[1:]), keys, seen, sink, scale, self.compute)
        return _rotate_back(out.flatten(0, 1), cos_sin)

    # ---- experts --------------------------------------------------------------------------------------------------------

    def route(self, x, gate, bias, positions, k, scale):
        ids, weights = plain.route(x, gate, bias, positions, k, scale)
        self.loads.append(torch.bincount(ids.flatten().long(), minlength=gate.shape[0]))
        return ids, weights

    def moe(self, x, ids, weights, w13, w2, limit, first) -> Tensor:
        int8 = isinstance(w13, Int8Site)
        if int8:
            x, w13, w2 = RoundInt8.apply(x), w13.weight, w2.weight
        tokens, k = ids.shape
        order = ids.flatten().argsort(stable=True)
        sizes = [*torch.bincount(ids.flatten().long(), minlength=w13.shape[0] - 1).tolist(), tokens]
        x, w13, w2 = x.to(self.compute), w13.to(self.compute), w2.to(self.compute)
        routed = torch.cat([x.index_select(0, torch.div(order, k, rounding_mode="floor")), x])
        h = torch.cat([part @ w.T for part, w in zip(routed.split(sizes), w13.unbind(), strict=True)])
        h = _activate(h, limit, torch.float32 if int8 else self.compute)
        h = RoundInt8.apply(h).to(self.compute) if int8 else h
        y = torch.cat([part @ w.T for part, w in zip(h.split(sizes), w2.unbind(), strict=True)]).float()
        routed, shared = y.split([tokens * k, tokens])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return shared + torch.bmm(weights.unsqueeze(1), routed.index_select(0, back).view(tokens, k, -1)).squeeze(1)


def _rotate_back(o: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.chunk(2, -1)
    return _rope(o, torch.cat([cos, -sin], -1), None, None, torch.float32)


def _index_loss(scores: Tensor, weights: Tensor) -> Tensor:
    """KL(attention mass on the selected entries, summed over heads || softmax of the scores), mean over rows that see any.

    scores [n, Q, E], -inf where not selected; weights [n, Q, H, E] detached probabilities.
    """
    mass = weights.detach().float().sum(2)
    given = scores > -torch.inf
    some = given.any(-1)
    target = mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)
    safe = torch.where(some.unsqueeze(-1), scores, 0.0)
    logp = torch.where(given, safe.log_softmax(-1), 0.0)
    entropy = torch.where(target > 0, target * target.clamp(min=1e-20).log(), 0.0)
    return ((entropy - target * logp).sum(-1) * some).sum() / some.sum().clamp(min=1)
