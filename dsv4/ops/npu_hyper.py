"""Hyper-connections on an NPU, from convertible primitives (no fused operator exists for A2 and A3).

Sinkhorn is two nodes a half-round: with a constant column of ones beside the 16 cells, one product with a constant matrix
gives every cell its row (or column) sum plus eps, and gives the ones back; one division follows. The vector form needs
three, the scaling form (`r = K/c + eps r`) four, because a batched product has no bias.
"""

import torch
from torch import Tensor

from dsv4.ops.npu_params import Packed


def sums(m: int, by_row: bool, eps: float, like: Tensor) -> Tensor:
    """[mm+1, mm+1]: cells of an m x m matrix, and a one, to the sums of their rows (columns) plus eps, and the one."""
    cells = torch.arange(m * m + 1, device=like.device)
    group = torch.div(cells, m, rounding_mode="floor") if by_row else cells % m
    one = cells == m * m
    group = torch.where(one, m, group)
    together = (group.unsqueeze(1) == group).to(like.dtype)
    return torch.where(one.unsqueeze(1), torch.where(one, 1.0, eps), together).to(like.dtype)


def sinkhorn(cells: Tensor, m: int, iters: int, eps: float) -> Tensor:
    """[T, m, m] non-negative to doubly stochastic: columns first and last, `iters` column rounds."""
    flat = torch.cat([cells.flatten(1), torch.ones(cells.shape[0], 1, dtype=cells.dtype, device=cells.device)], 1)
    columns, rows = sums(m, False, eps, flat), sums(m, True, eps, flat)
    flat = flat / (flat @ columns)
    for _ in range(iters - 1):
        flat = flat / (flat @ rows)
        flat = flat / (flat @ columns)
    return flat[:, : m * m].unflatten(1, (m, m))


def _mix(streams: Tensor, fn: Packed, base: Tensor, eps: float) -> Tensor:
    """Logits of the mixing weights; `prepare` has folded their scale into fn."""
    flat = streams.flatten(1)
    ones = torch.ones(flat.shape[1], dtype=flat.dtype, device=flat.device)
    normed, _ = torch.ops.npu.npu_rms_norm(flat, ones, eps)
    return normed @ fn.values + base


def _norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x is rounded to bf16, the normed result is not."""
    return torch.ops.npu.npu_rms_norm(x.bfloat16().float(), gamma, eps)[0]


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
    pre, post, comb = _mix(streams, fn, base, eps).split([m, m, m * m], 1)
    comb = comb.unflatten(1, (m, m)).softmax(-1) + hc_eps
    x = _collapse(torch.sigmoid(pre) + hc_eps, streams)
    return _norm(x, gamma, eps), 2 * torch.sigmoid(post), sinkhorn(comb, m, iters, hc_eps)


def hc_post(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `plain.hc_post`."""
    return torch.bmm(comb.transpose(1, 2), streams) + post.unsqueeze(-1) * y.unsqueeze(1)


def hc_head(
    streams: Tensor, fn: Packed, base: Tensor, scale: Tensor, gamma: Tensor, eps: float, hc_eps: float
) -> tuple[Tensor, Tensor]:
    """See `plain.hc_head`."""
    pre = torch.sigmoid(_mix(streams, fn, base, eps)) + hc_eps
    h = _collapse(pre, streams).bfloat16().float()
    return h, torch.ops.npu.npu_rms_norm(h, gamma, eps)[0]
