"""From block rows to drafts (drafter.md section 4): base logits, the Markov chain, confidence."""

import torch
from torch import Tensor

from dsv4.batch import Tables
from dsv4.cache import Cache
from dsv4.drafter.stages import Block, run_block
from dsv4.model.context import Env
from dsv4.model.layer import logits
from dsv4.ops.collectives import all_columns
from dsv4.params import Drafter, Params


def block_logits(
    env: Env, params: Params, cache: Cache, tables: Tables, slots: Tensor, anchor: Tensor, position: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """(h [R*k, D], base logits [R, k, V]) of the blocks whose anchors sit at `position`."""
    cfg, ops, p = env.cfg, env.ops, params.drafter
    window = ops.take(tables.window, slots)
    found = ops.draft_addresses(anchor, position, window, k, cfg.sliding_window, cfg.dspark_noise_token_id)
    ids, positions, context_rows, own = found
    at = Block(
        ids=ids, positions=positions, rope=ops.take(params.rope.plain, positions), context_rows=context_rows, own=own
    )
    streams = run_block(env, p, params.target.embed, cache, at)
    h, base = logits(env, p.hc_head, p.norm, params.target.head, streams)
    base = all_columns(base, env.mesh)  # here and not in the chain: one exchange a step, not one a draft
    return h, base.unflatten(0, (-1, k))


def propose(
    env: Env, params: Params, cache: Cache, tables: Tables, slots: Tensor, anchor: Tensor, position: Tensor, k: int
) -> Tensor:
    """The next k drafts of each slot, [R, k]."""
    _, base = block_logits(env, params, cache, tables, slots, anchor, position, k)
    return env.ops.markov(base, params.drafter.markov_w1, params.drafter.markov_w2, anchor)


def chain(env: Env, p: Drafter, h: Tensor, base: Tensor, anchor: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the greedy chain saw: logits [R, k, V] with the Markov bias, and confidences [R, k]."""
    before = torch.cat([anchor.unsqueeze(1), tokens[:, :-1]], 1).flatten()
    embedded = env.ops.take(p.markov_w1, before)
    bias = env.ops.linear(embedded, p.markov_w2)
    features = torch.cat([h, embedded.float()], 1)  # the pre-norm h, no bias
    confidence = torch.sigmoid(env.ops.linear(features, p.confidence))
    return base + bias.view_as(base), confidence.view(tokens.shape)
