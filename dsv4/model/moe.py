"""The mixture of experts (model.md section 7): route, exchange over EP, experts.

Attention leaves the same rows on every rank of a TP group. With expert parallelism each rank takes its share of them,
routes it, and gets it back whole from wherever its experts are; the share of every rank is then gathered within TP.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.mesh import Mesh
from dsv4.model.context import Env
from dsv4.ops.collectives import all_gather, reduce_scatter
from dsv4.params import Experts, HashRouter, LearnedRouter, Matrix
from dsv4.tree import is_int8, map_leaves


def route(
    env: Env, p: LearnedRouter | HashRouter, x: Tensor, ids: Tensor | None, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Expert ids [T, k] and weights [T, k]; hash routers look up `ids`, the token of each row."""
    k, scale = env.cfg.num_experts_per_tok, env.cfg.routed_scaling_factor
    if isinstance(p, HashRouter):
        return env.ops.route_hash(x, p.gate, p.tid2eid, ids, positions, scale)
    return env.ops.route(x, p.gate, p.bias, positions, k, scale)


def feed_forward(
    env: Env, router: LearnedRouter | HashRouter, experts: Experts, x: Tensor, ids: Tensor | None, positions: Tensor
) -> Tensor:
    """Routed experts plus the shared one, [T, D]."""
    mesh = env.mesh
    first = mesh.experts(env.cfg).start
    if mesh.ep_group is None:
        chosen, weights = route(env, router, x, ids, positions)
        return env.ops.moe(x, chosen, weights, experts.w13, experts.w2, env.cfg.swiglu_limit, first)
    tokens = x.shape[0]
    x, ids, positions = (
        own_rows(x, mesh, 0),
        None if ids is None else own_rows(ids, mesh, 0),
        own_rows(positions, mesh, -1),
    )
    chosen, weights = route(env, router, x, ids, positions)
    moe = env.ops.moe if mesh.ops_exchange else functools.partial(gathered_moe, env)
    y = moe(x, chosen, weights, experts.w13, experts.w2, env.cfg.swiglu_limit, first)
    return all_gather(y, mesh.tp_group)[:tokens]


def own_rows(x: Tensor, mesh: Mesh, fill: int) -> Tensor:
    """This rank's share [ceil(T/tp), ...] of rows that its TP group has in common, padded with `fill` at the end."""
    share = -(-x.shape[0] // mesh.tp)
    missing = share * mesh.tp - x.shape[0]
    if missing:
        x = torch.cat([x, x.new_full((missing, *x.shape[1:]), fill)])
    return x[mesh.tp_rank * share : (mesh.tp_rank + 1) * share]


def gathered_moe(
    env: Env, x: Tensor, ids: Tensor, weights: Tensor, w13: Matrix, w2: Matrix, limit: float, first: int
) -> Tensor:
    """`moe` of own rows over plain collectives: every rank sees all rows and computes the routes to its experts.

    Routes travel one by one and are summed by the row's owner in slot order: the values are those of one rank, bit for bit,
    at the price of k times the traffic of sums.
    """
    mesh, ops = env.mesh, env.ops
    rows, choices, shares = _gather_routes(x, ids, weights, mesh.ep_group)
    local = (choices >= first) & (choices < first + w13.shape[0] - 1)
    choices = torch.where(local, choices, -1)
    k = ids.shape[1]
    rows = rows.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
    routes = ops.moe(rows, choices.view(-1, 1), shares.reshape(-1, 1), w13, _silent_last(w2), limit, first)
    routes = reduce_scatter(routes.view(-1, k, x.shape[1]), mesh.ep_group)  # one rank's summand is not zero
    shared = ops.moe(x, ids, weights, _last(w13), _last(w2), limit, first)
    y = functools.reduce(torch.add, routes.unbind(1)) + shared
    return y.bfloat16().float() if is_int8(w2) else y


def _gather_routes(x: Tensor, ids: Tensor, weights: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """The three of every rank, in one exchange: ids travel as the bits of float32 numbers."""
    k = ids.shape[1]
    packed = all_gather(torch.cat([x, weights, ids.view(torch.float32)], 1), group)
    rows, shares, choices = packed.split([x.shape[1], k, k], 1)
    return rows, choices.contiguous().view(torch.int32), shares


def _last(w: Matrix) -> Matrix:
    """The stack of the shared expert alone."""
    return map_leaves(lambda x: x[-1:], w)


def _silent_last(w2: Matrix) -> Matrix:
    """The stack with a shared expert that gives 0. Int8 costs its scales; float stacks, which are for tests, are copied."""

    def silence(x: Tensor) -> Tensor:
        return torch.cat([x[:-1], torch.zeros_like(x[-1:])])

    return replace(w2, scale=silence(w2.scale)) if is_int8(w2) else map_leaves(silence, w2)
