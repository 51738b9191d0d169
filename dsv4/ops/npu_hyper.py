"""Hyper-connections on an NPU, from convertible primitives (no fused operator exists for A2 and A3).

Sinkhorn is one node a half-round: dividing a row by its sum is `log_softmax` of the logarithms. Only the first round keeps the
definition's eps: every later sum lies between 1/m and m, where 1e-6 changes a result by 1e-6.
"""

import torch
from torch import Tensor

from dsv4.ops.npu_params import Packed


def sinkhorn(cells: Tensor, iters: int, eps: float) -> Tensor:
    """[T, m, m] positive to doubly stochastic: columns first and last, `iters` column rounds."""
    logs = torch.log(cells / (cells.sum(1, keepdim=True) + eps))
    for _ in range(iters - 1):
        logs = logs.log_softmax(2).log_softmax(1)
    return torch.exp(logs)


def _mix(streams: Tensor, fn: Packed, base: Tensor, eps: float) -> Tensor:
    """Logits of the mixing weights; `prepare` has folded their scale into fn."""
    flat = streams.flatten(1)
    ones = torch.ones(flat.shape[1], dtype=flat.dtype, device=flat.device)
    normed, _ = torch.ops.npu.npu_rms_norm(flat, ones, eps)
    return normed @ fn.values + base


def _norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x is rounded to bf16; the normed result comes in gamma's dtype, so that a float32 gamma keeps it unrounded."""
    return torch.ops.npu.npu_rms_norm(x.bfloat16().to(gamma.dtype), gamma, eps)[0]


def _collapse(pre: Tensor, streams: Tensor) -> Tensor:
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1)


def hc_pre(
    streams: Tensor,
    fn: Packed,
    base: Tensor,
    scale: Tensor,
    gamma: Tensor,
    iters: int,
    eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `plain.hc_pre`; `prepare` folds `scale` into `fn`, so it is not read here."""
    m = streams.shape[1]
    gates, comb = _mix(streams, fn, base, eps).split([2 * m, m * m], 1)
    entering = torch.arange(2 * m, device=gates.device) < m  # pre = hc_eps + sigmoid, post = 2 sigmoid, in one node
    offset, gain = torch.where(entering, hc_eps, 0.0), torch.where(entering, 1.0, 2.0)
    pre, post = torch.addcmul(offset, torch.sigmoid(gates), gain).split([m, m], 1)
    comb = comb.unflatten(1, (m, m)).softmax(-1) + hc_eps
    return _norm(_collapse(pre, streams), gamma, eps), post, sinkhorn(comb, iters, hc_eps)


def hc_post(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `plain.hc_post`."""
    return torch.addcmul(torch.bmm(comb.transpose(1, 2), streams), post.unsqueeze(-1), y.float().unsqueeze(1))


def hc_head(
    streams: Tensor, fn: Packed, base: Tensor, scale: Tensor, gamma: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor]:
    """See `plain.hc_head`."""
    pre = torch.sigmoid(_mix(streams, fn, base, eps)) + hc_eps
    h = _collapse(pre, streams).bfloat16().float()
    return h, torch.ops.npu.npu_rms_norm(h, gamma, eps)[0]
