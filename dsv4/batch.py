"""What a step is given and gives back, besides parameters and caches. All integer tensors are int32.

`RowState` lives on the device for as long as the engine: a row of it is a *slot*, one request's seat. Slot S (the last row) is
the dummy seat of padding rows: its limit is 0, so it never runs. The host writes page tables; programs write the rest.
"""

import torch
from torch import Tensor

from dsv4.cache import PAGE_TOKENS
from dsv4.tree import tree


@tree
class Tables:
    """Page ids by slot and column, [S+1, width]; unused columns hold the null page 0."""

    history: Tensor
    window: Tensor
    tail: Tensor
    open: Tensor


@tree
class RowState:
    """anchor, position, limit, eos [S+1]; drafts [S+1, K].

    position n: tokens whose target state is final; the anchor sits at n and has not been run. limit: length at which the
    request ends (prompt + max_tokens), 0 when it has ended. eos: the id that ends it, -1 for none.
    """

    tables: Tables
    anchor: Tensor
    drafts: Tensor
    position: Tensor
    limit: Tensor
    eos: Tensor


@tree
class Extras:
    """What only a full step takes. mask [n, ceil(V/32)]: bit i % 32 of word i // 32 allows token i in that row, n = R rows for
    prefill, R * Q for verification; all ones where nothing is constrained. drafts [R, K]: drafts to verify instead of the
    slot's own, -1 where its own are meant (empty for prefill)."""

    mask: Tensor
    drafts: Tensor


@tree
class PrefillBatch:
    """Tiles of prompts: row r runs ids[r, :length[r]] of slot slots[r] at positions start[r] onwards.

    last [R]: flat index (r * Q + length - 1) of the tile's last token. A tile that ends a prompt has its slot in `final`, and
    the request's limit and eos; others have the dummy slot, 0 and -1.
    """

    slots: Tensor
    start: Tensor
    length: Tensor
    ids: Tensor
    last: Tensor
    final: Tensor
    limit: Tensor
    eos: Tensor
    extras: Extras | None = None


@tree
class RowBatch:
    """Decode, speculate and seed steps: the slots that take part, the dummy slot for padding. slots [R]."""

    slots: Tensor
    extras: Extras | None = None


@tree
class Scores:
    """Log-probabilities of the unmasked logits, float32. chosen [n] of each row's token; top_ids int32 and top [n, 20] of the
    likeliest tokens, best first (ties: lowest id first)."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


@tree
class StepOutput:
    """tokens [R, Q] emitted (then -1); count [R] of them; proposed [R] drafts that were verified; drafts [R, K] the next ones
    (None where the step drafts nothing); scores of all rows in a full step."""

    tokens: Tensor
    count: Tensor
    proposed: Tensor
    drafts: Tensor | None = None
    scores: Scores | None = None


@tree
class SeedOutput:
    """drafts [R, K]: the first ones of each slot."""

    drafts: Tensor


def make_row_state(slots: int, widths: dict[str, int], drafts: int, device: str = "cpu") -> RowState:
    """Empty seats: every table column is the null page, every limit 0."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(slots + 1, *shape, dtype=torch.int32, device=device)

    return RowState(
        tables=Tables(**{group: zeros(widths[group]) for group in PAGE_TOKENS}),
        anchor=zeros(),
        drafts=zeros(drafts),
        position=zeros(),
        limit=zeros(),
        eos=zeros(),
    )
