"""The named operators that keep the books, as plain PyTorch: addresses of cache rows, writes, row state. Integers mostly.

Conventions are those of `plain`, which re-exports these.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

PAGE_HISTORY, PAGE_WINDOW, PAGE_TAIL, PAGE_OPEN = 128, 32, 8, 32  # tokens per page of the four page groups (cache.py)


def take(table: Shaped[Tensor, "N ..."], rows: Int[Tensor, " n"]) -> Shaped[Tensor, "n ..."]:
    """Rows of a table; an index below 0 reads row 0."""
    return table[rows.clamp(min=0).long()]


def _pool_rows(table: Int[Tensor, "R C"], positions: Int[Tensor, "R n"], page: int) -> Int[Tensor, "R n"]:
    """Pool row of each position through a ring page table; -1 for positions below 0."""
    column = torch.div(positions.clamp(min=0), page, rounding_mode="floor") % table.shape[1]
    rows = torch.gather(table, 1, column.long()) * page + positions.clamp(min=0) % page
    return torch.where(positions >= 0, rows, -1).to(torch.int32)


def _closing(start: Tensor, length: Tensor, query_len: int, ratio: int) -> tuple[Tensor, Tensor]:
    """Windows that may close in each row, [R, J], and whether they do."""
    windows = torch.div(start, ratio, rounding_mode="floor").unsqueeze(1) + torch.arange(
        -(-query_len // ratio), dtype=torch.int32, device=start.device
    )
    return windows, windows * ratio + ratio <= (start + length).unsqueeze(1)


def addresses(
    start: Int[Tensor, " R"],
    length: Int[Tensor, " R"],
    history: Int[Tensor, "R P"],
    window: Int[Tensor, "R Cw"],
    tail: Int[Tensor, "R Ct"],
    open_: Int[Tensor, "R Co"],
    query_len: int,
    width: int,
) -> tuple[Tensor, ...]:
    """Where this step's rows go and what they may see; computed once, used by every layer.

    Row r holds positions start[r] .. start[r]+length[r]-1, then padding up to query_len. Returns, all int32:
    positions [T] (-1 padding); pool rows written by each token: window_slots, tail_slots, open_slots [T];
    window_rows [T, width]: pool rows of positions p-width+1 .. p; for the CSA windows that close in the step
    (J = ceil(Q/4) per row): csa_slots [R*J] (0 if not closing), csa_rows [R*J, 8] (tail pool rows of tokens 4w-4 .. 4w+3),
    csa_starts [R*J] (position 4w, -1 if not closing); the same for HCA: hca_slots, hca_rows [R*J, 128], hca_starts;
    csa_visible, hca_visible [T]: entries w < floor((p+1)/ratio).
    """
    steps = torch.arange(query_len, dtype=torch.int32, device=start.device)
    live = steps < length.unsqueeze(1)
    positions = torch.where(live, start.unsqueeze(1) + steps, -1)
    slots = [
        _pool_rows(table, positions, page).clamp(min=0).flatten()
        for table, page in ((window, PAGE_WINDOW), (tail, PAGE_TAIL), (open_, PAGE_OPEN))
    ]
    back = torch.arange(1 - width, 1, dtype=torch.int32, device=start.device)
    seen = torch.where(positions.unsqueeze(-1) >= 0, positions.unsqueeze(-1) + back, -1)
    window_rows = _pool_rows(window, seen.flatten(1), PAGE_WINDOW).view(-1, width)

    def closings(ratio: int, table: Tensor, page: int, reach: int) -> list[Tensor]:
        windows, closes = _closing(start, length, query_len, ratio)
        per_page = PAGE_HISTORY // ratio
        column = torch.div(windows, per_page, rounding_mode="floor").clamp(0, history.shape[1] - 1)
        entry = torch.gather(history, 1, column.long()) * per_page + windows % per_page
        first = windows * ratio + ratio - reach
        tokens = first.unsqueeze(-1) + torch.arange(reach, dtype=torch.int32, device=start.device)
        tokens = torch.where(closes.unsqueeze(-1), tokens, -1)
        rows = _pool_rows(table, tokens.flatten(1), page).view(-1, reach)
        slots = torch.where(closes, entry, 0).flatten().to(torch.int32)
        return [slots, rows, torch.where(closes, windows * ratio, -1).flatten().to(torch.int32)]

    flat = positions.flatten().to(torch.int32)
    csa, hca = closings(4, tail, PAGE_TAIL, 8), closings(128, open_, PAGE_OPEN, 128)
    visible = [torch.div(flat + 1, ratio, rounding_mode="floor").to(torch.int32) for ratio in (4, 128)]
    return flat, *slots, window_rows, *csa, *hca, *visible


def draft_addresses(
    anchor: Int[Tensor, " R"],
    position: Int[Tensor, " R"],
    window: Int[Tensor, "R Cw"],
    block: int,
    width: int,
    noise: int,
) -> tuple[Int[Tensor, " Rk"], Int[Tensor, " Rk"], Int[Tensor, "R W"], Int[Tensor, "R k"]]:
    """The drafter's block for anchors at `position` (drafter.md section 3).

    Returns ids [R*block] = anchor, noise, noise, ... per row; their positions [R*block], from `position` on; context rows
    [R, width] of positions p-width+1 .. p with p = position-1 (the same for every row of the block); and the block's own
    rows [R, block] in a [R*block, d] tensor.
    """
    steps = torch.arange(block, dtype=torch.int32, device=position.device)
    back = torch.arange(-width, 0, dtype=torch.int32, device=position.device)
    ids = torch.where(steps == 0, anchor.unsqueeze(1), noise).to(torch.int32)
    rows = _pool_rows(window, position.unsqueeze(1) + back, PAGE_WINDOW)
    own = torch.arange(position.shape[0] * block, dtype=torch.int32, device=position.device).view(-1, block)
    return ids.flatten(), (position.unsqueeze(1) + steps).flatten(), rows, own


def scatter(pool: Shaped[Tensor, "N ..."], slots: Int[Tensor, " n"], rows: Shaped[Tensor, "n ..."]) -> Tensor:
    """pool[slots] = rows, cast to the pool's dtype. Writes: pool."""
    return pool.index_put_((slots.long(),), rows.to(pool.dtype))


def write_state(
    pool: Float[Tensor, "N C2"],
    slots: Int[Tensor, " T"],
    rows: Float[Tensor, "T C2"],
    ape: Float[Tensor, "r C"],
    positions: Int[Tensor, " T"],
) -> Float[Tensor, "N C2"]:
    """Compressor rows: values | gates + ape[position % r], float32. Writes: pool."""
    values, gates = rows.float().chunk(2, -1)
    gates = gates + ape[(positions.clamp(min=0) % ape.shape[0]).long()]
    return scatter(pool, slots, torch.cat([values, gates], -1))


# ---- row state -------------------------------------------------------------------------------------------------------


def begin(
    slots: Int[Tensor, " R"],
    anchor: Int[Tensor, " S"],
    drafts: Int[Tensor, "S k"],
    position: Int[Tensor, " S"],
    limit: Int[Tensor, " S"],
    query_len: int,
) -> tuple[Int[Tensor, "R Q"], Int[Tensor, " R"], Int[Tensor, " R"]]:
    """The rows a decode or verify step runs: ids (anchor, then drafts), start position, number of live rows.

    A row at position p yields the token of p+1, so rows run while p <= limit-2; a finished slot has no live row.
    """
    start = take(position, slots)
    length = (take(limit, slots) - 1 - start).clamp(0, query_len)
    ids = torch.cat([take(anchor, slots).unsqueeze(1), take(drafts, slots)[:, : query_len - 1]], 1)
    return ids, start, length.to(torch.int32)


def accept(
    ids: Int[Tensor, "R Q"], greedy: Int[Tensor, "R Q"], length: Int[Tensor, " R"], eos: Int[Tensor, " R"]
) -> tuple[Int[Tensor, "R Q"], Int[Tensor, " R"], Int[Tensor, " R"], Int[Tensor, " R"]]:
    """Greedy verification (drafter.md section 5): tokens emitted (then -1), how many, whether EOS ended the row, and how many
    drafts were verified (length - 1).

    Row j's token `greedy[j]` is emitted iff every draft ids[1..j] equals the token before it; nothing follows EOS.
    eos is the ending token's id, or -1 to ignore it.
    """
    right = torch.cat([torch.ones_like(ids[:, :1]), (ids[:, 1:] == greedy[:, :-1]).to(ids.dtype)], 1)
    ended = torch.cat([torch.zeros_like(ids[:, :1]), (greedy[:, :-1] == eos.unsqueeze(1)).to(ids.dtype)], 1)
    steps = torch.arange(ids.shape[1], device=ids.device)
    keep = (steps < length.unsqueeze(1)) & ((1 - right + ended).cumsum(1) == 0)
    tokens = torch.where(keep, greedy, -1).to(torch.int32)
    over = ((tokens == eos.unsqueeze(1)) & keep).any(1)
    return tokens, keep.sum(1).to(torch.int32), over.to(torch.int32), (length - 1).clamp(min=0)


def commit(
    slots: Int[Tensor, " R"],
    tokens: Int[Tensor, "R Q"],
    count: Int[Tensor, " R"],
    ended: Int[Tensor, " R"],
    anchor: Int[Tensor, " S"],
    position: Int[Tensor, " S"],
    limit: Int[Tensor, " S"],
) -> None:
    """Advances the slots by the emitted tokens: the last one becomes the anchor; EOS sets the limit to 0.

    Slots are distinct, except that padding rows share one whose rows have count 0. Writes: anchor, position, limit.
    """
    rows = slots.long()
    last = tokens.gather(1, (count - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
    anchor.index_put_((rows,), torch.where(count > 0, last, anchor[rows]))
    position.index_put_((rows,), position[rows] + count)
    limit.index_put_((rows,), torch.where(ended > 0, 0, limit[rows]))
