"""The plain operators, made fit for capture.

One definition looks at data on the host: `moe` picks each expert's rows. Wrapped as one opaque operator it can stand in a
static graph; the others are captured as they are.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dsv4.ops.table import PLAIN
from dsv4.tree import QuantWeight

Matrix = Tensor | QuantWeight


@torch.library.custom_op("dsv4::plain_moe", mutates_args=())
def _moe(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor | None, w2: Tensor, s2: Tensor | None, limit: float,
    first: int,
) -> Tensor:  # fmt: skip
    up = w13 if s13 is None else QuantWeight(values=w13, scale=s13)
    down = w2 if s2 is None else QuantWeight(values=w2, scale=s2)
    return PLAIN.moe(x, ids, weights, up, down, limit, first)


@_moe.register_fake
def _(x, *_) -> Tensor:
    return x.new_empty(x.shape)


def moe(x: Tensor, ids: Tensor, weights: Tensor, w13: Matrix, w2: Matrix, limit: float, first: int) -> Tensor:
    """`plain.moe` as one node."""
    (a, sa), (b, sb) = ((w.values, w.scale) if isinstance(w, QuantWeight) else (w, None) for w in (w13, w2))
    return _moe(x, ids, weights, a, sa, b, sb, limit, first)


CAPTURABLE = replace(PLAIN, moe=moe)
