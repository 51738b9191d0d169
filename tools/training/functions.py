"""Differentiable functions with backward passes written by hand: attention with a sink, Sinkhorn, int8 rounding, cross entropy.

Element-wise work can be compiled: on a CPU it is memory traffic, and most of a training step.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

_use_compiler = False


def use_compiler() -> None:
    """From now on `compiled` functions are what their name says: a minute of compilation, then half the time per step."""
    global _use_compiler
    _use_compiler = True
    torch._dynamo.config.recompile_limit = 64  # a handful of shapes for each function


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, through Inductor once `use_compiler` has been called."""

    @cache
    def fused() -> Callable[..., Any]:
        return torch.compile(fn, dynamic=False)

    @wraps(fn)
    def call(*args: Any) -> Any:
        return fused()(*args) if _use_compiler else fn(*args)

    return call


@compiled
def _round_int8(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 127
    return torch.round(x / step) * step


@compiled
def _probabilities(scores: Tensor, seen: Tensor, sink: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weights of the keys, weight of the sink [..., 1]) of scores [n, Q, H, keys], seen [n, Q, keys]."""
    scores = torch.where(seen.unsqueeze(2), scores.float(), -torch.inf)
    top = torch.maximum(scores.amax(-1), sink).unsqueeze(-1)
    p = torch.exp(scores - top)
    sunk = torch.exp(sink.unsqueeze(-1) - top)
    total = p.sum(-1, keepdim=True) + sunk
    return (p / total).to(dtype), sunk / total


@compiled
def _score_gradient(dp: Tensor, p: Tensor, inner: Tensor) -> Tensor:
    return ((dp.float() - inner) * p).to(p.dtype)


@compiled
def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = logits - logits.logsumexp(-1, keepdim=True)
    hit = torch.arange(logits.shape[-1]) == labels.unsqueeze(-1)
    return -(logp * hit).sum() / labels.shape[0], (torch.exp(logp) - hit.float()) / labels.shape[0]


class CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of logits f32 [n, V] and labels int64 [n], its gradient made on the way."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        loss, gradient = _cross_entropy(logits, labels)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradient, None


class RoundInt8(torch.autograd.Function):
    """x rounded to per-row int8 (the last axis is a row), as `plain.quantise` then back; gradients pass straight through."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return _round_int8(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class SinkAttention(torch.autograd.Function):
    """softmax(scale q k^T, sink) k for q [n, Q, H, d], shared keys = values [n, keys, d], seen [n, Q, keys], sink [H].

    Returns (out f32 [n, Q, H, d], weights [n, Q, H, keys]); only `out` is differentiable.
    """

    @staticmethod
    def forward(ctx, q, keys, seen, sink, scale, compute) -> tuple[Tensor, Tensor]:
        n, queries, heads, d = q.shape
        q16, k16 = (q * scale).to(compute), keys.to(compute)
        scores = torch.bmm(q16.view(n, queries * heads, d), k16.mT).view(n, queries, heads, -1)
        p, sunk = _probabilities(scores, seen, sink, compute)
        out = torch.bmm(p.view(n, queries * heads, -1), k16).view(q.shape)
        ctx.save_for_backward(q16, k16, p, out, sunk)
        ctx.scale = scale
        ctx.mark_non_differentiable(p)
        return out.float(), p

    @staticmethod
    def backward(ctx, gradient: Tensor, _) -> tuple[Tensor | None, ...]:
        q16, k16, p, out, sunk = ctx.saved_tensors
        n, queries, heads, d = q16.shape
        flat = (n, queries * heads, -1)
        g16 = gradient.to(p.dtype)
        inner = (gradient * out).sum(-1, keepdim=True)
        ds = torch.bmm(g16.view(*flat[:2], d), k16.mT).view(p.shape)
        ds = _score_gradient(ds, p, inner)
        dq = torch.bmm(ds.view(flat), k16).view(q16.shape).float().mul_(ctx.scale)
        dk = torch.bmm(ds.view(flat).mT, q16.view(*flat[:2], d)) + torch.bmm(p.view(flat).mT, g16.view(*flat[:2], d))
        return dq, dk.float(), None, -(sunk * inner).sum((0, 1, 3)), None, None


class Sinkhorn(torch.autograd.Function):
    """softmax over columns + eps, then `iters` column and `iters - 1` row normalisations of logits [T, m, m].

    The same matrix as in `plain.hc_pre`, as scalings of rows and columns: C = K / (r c). The gradient is that of the fixed point
    (a doubly stochastic matrix), found with a few alternations instead of by walking the iterations back.
    """

    BACKWARD = 8

    @staticmethod
    def forward(ctx, logits: Tensor, iters: int, eps: float) -> Tensor:
        k = logits.permute(1, 2, 0).contiguous()  # tokens innermost: every operation is one vectorised pass
        soft = k.softmax(1)
        k = soft + eps
        r = torch.ones_like(k[:, :1])
        c = k.sum(0, keepdim=True) + eps
        for _ in range(iters - 1):
            r = (k / c).sum(1, keepdim=True) + eps * r
            c = (k / r).sum(0, keepdim=True) + eps * c
        comb = k / (r * c)
        ctx.save_for_backward(comb, soft, k)
        return comb.permute(2, 0, 1).contiguous()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        comb, soft, k = ctx.saved_tensors
        g = gradient.permute(1, 2, 0) * comb
        rows, cols = g.sum(1, keepdim=True), g.sum(0, keepdim=True)
        beta = torch.zeros_like(cols)
        for _ in range(Sinkhorn.BACKWARD):
            alpha = rows - (comb * beta).sum(1, keepdim=True)
            beta = cols - (comb * alpha).sum(0, keepdim=True)
        dk = (g - comb * (alpha + beta)) * (soft / k)
        dk = dk - soft * dk.sum(1, keepdim=True)
        return dk.permute(2, 0, 1), None, None
