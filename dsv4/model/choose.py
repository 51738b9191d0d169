"""From logits to tokens: the greedy choice, and what a full step adds (masks before it, log-probabilities beside it)."""

import torch
from torch import Tensor

from dsv4.batch import Extras, Scores
from dsv4.model.context import Env
from dsv4.model.layer import logits
from dsv4.ops.collectives import all_columns, global_argmax
from dsv4.params import Params

TOP = 20


def allowed(scores: Tensor, mask: Tensor) -> Tensor:
    """Logits [n, V] with -inf where `mask` [n, ceil(V/32)] has a zero bit."""
    bits = torch.pow(2, torch.arange(32, device=mask.device))  # int64: shifts and bit 31 of int32 do not lower on NPUs
    legal = torch.bitwise_and(mask.long().unsqueeze(-1), bits).ne(0).flatten(1)[:, : scores.shape[1]]
    return torch.where(legal, scores, -torch.inf)


def log_probabilities(scores: Tensor, tokens: Tensor) -> Scores:
    """Of unmasked logits [n, V] and the chosen tokens [n]."""
    logp = scores - scores.logsumexp(-1, keepdim=True)
    top, ids = logp.sort(dim=-1, descending=True, stable=True)
    chosen = logp.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    return Scores(chosen=chosen, top_ids=ids[:, :TOP].to(torch.int32), top=top[:, :TOP].contiguous())


def choose(env: Env, params: Params, streams: Tensor, extras: Extras | None) -> tuple[Tensor, Scores | None]:
    """The greedy token of each row [n], int32; in a full step among the legal ones, with log-probabilities."""
    target = params.target
    _, scores = logits(env, target.hc_head, target.norm, target.head, streams)
    if extras is None:
        return global_argmax(env.ops, scores, env.mesh), None
    scores = all_columns(scores, env.mesh)
    tokens = env.ops.argmax(allowed(scores, extras.mask))
    return tokens, log_probabilities(scores, tokens)
