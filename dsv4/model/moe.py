"""The mixture of experts (model.md section 7): route, exchange over EP, experts."""

from torch import Tensor

from dsv4.model.context import Env
from dsv4.params import Experts, HashRouter, LearnedRouter


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
    chosen, weights = route(env, router, x, ids, positions)
    first = env.mesh.experts(env.cfg).start
    return env.ops.moe(x, chosen, weights, experts.w13, experts.w2, env.cfg.swiglu_limit, first)
