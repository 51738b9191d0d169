"""Kernels that move rows and count: cache addresses, pools, tokens and slots. See `plain` for each."""

import torch
from torch import Tensor

from dsv4.ops.cpu_call import F32, I32, Launch, code, kernel, matrix, shaped, strides, trailing, whole

# ---- cache addressing ---------------------------------------------------------------------------------------------------

kernel(
    "take",
    "(Tensor table, Tensor rows) -> Tensor",
    rows="rows",
    outputs=lambda table, rows: [((rows.shape[0], *table.shape[1:]), table.dtype)],
    fill=lambda table, rows, out: Launch(
        (table, whole(rows, I32), out),
        (rows.shape[0], table.shape[0], trailing(table) * table.itemsize, strides(table, 1)[0] * table.itemsize),
    ),
)


def _address_shapes(
    start: Tensor,
    length: Tensor,
    history: Tensor,
    window: Tensor,
    tail: Tensor,
    open_: Tensor,
    query_len: int,
    width: int,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    tokens = start.shape[0] * query_len
    csa, hca = (start.shape[0] * -(-query_len // ratio) for ratio in (4, 128))
    shapes = [(tokens,)] * 4 + [(tokens, width), (csa,), (csa, 8), (csa,), (hca,), (hca, 128), (hca,)] + [(tokens,)] * 2
    return [(shape, I32) for shape in shapes]


kernel(
    "addresses",
    "(Tensor start, Tensor length, Tensor history, Tensor window, Tensor tail, Tensor open_, int query_len, int width)"
    f" -> ({', '.join(['Tensor'] * 13)})",
    outputs=_address_shapes,
    fill=lambda start, length, history, window, tail, open_, query_len, width, *outs: Launch(
        (*(whole(t, I32, start.shape[0], *t.shape[1:]) for t in (start, length, history, window, tail, open_)), *outs),
        (*history.shape, window.shape[1], tail.shape[1], open_.shape[1], query_len, width),
    ),
)

kernel(
    "draft_addresses",
    "(Tensor anchor, Tensor position, Tensor window, int block, int width, int noise)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    outputs=lambda anchor, position, window, block, width, noise: [
        ((position.shape[0] * block,), I32),
        ((position.shape[0] * block,), I32),
        ((position.shape[0], width), I32),
        ((position.shape[0], block), I32),
    ],
    fill=lambda anchor, position, window, block, width, noise, *outs: Launch(
        (*(whole(t, I32, window.shape[0], *t.shape[1:]) for t in (anchor, position, window)), *outs),
        (*window.shape, block, width, noise),
    ),
)


def wide_enough(drafts: Tensor, tokens: int) -> Tensor:
    """Drafts of each slot, which must hold `tokens` of them."""
    if drafts.shape[1] < tokens:
        raise TypeError(f"CPU kernel: expected at least {tokens} drafts per slot, got shape {list(drafts.shape)}")
    return drafts


def _fill_scatter(pool: Tensor, slots: Tensor, rows: Tensor) -> Launch:
    floats = (F32, torch.bfloat16)
    cast = floats if pool.dtype in floats else (pool.dtype,)
    ints = (rows.shape[0], pool.shape[0], trailing(pool), *strides(rows, 1), code(pool, *cast), code(rows, *cast))
    return Launch(
        (whole(pool, pool.dtype), whole(slots, I32, rows.shape[0]), shaped(rows, rows.shape[0], *pool.shape[1:])),
        (*ints, pool.itemsize),
    )


kernel(
    "scatter",
    "(Tensor(a!) pool, Tensor slots, Tensor rows) -> ()",
    rows="slots rows",
    outputs=lambda *_: [],
    fill=_fill_scatter,
)

kernel(
    "write_state",
    "(Tensor(a!) pool, Tensor slots, Tensor rows, Tensor ape, Tensor positions) -> ()",
    rows="slots rows positions",
    outputs=lambda *_: [],
    fill=lambda pool, slots, rows, ape, positions: Launch(
        (
            whole(pool, F32, pool.shape[0], 2 * ape.shape[1]),
            whole(slots, I32, rows.shape[0]),
            shaped(rows, rows.shape[0], pool.shape[1]),
            whole(ape, F32),
            whole(positions, I32, rows.shape[0]),
        ),
        (rows.shape[0], *pool.shape, ape.shape[0], *strides(rows, 1), code(rows)),
    ),
)

# ---- tokens -------------------------------------------------------------------------------------------------------------

kernel(
    "argmax",
    "(Tensor logits) -> Tensor",
    rows="logits",
    outputs=lambda logits: [(logits.shape[:1], I32)],
    fill=lambda logits, out: Launch((logits, out), (*logits.shape, *strides(logits, 1), code(logits))),
)

kernel(
    "markov",
    "(Tensor base, Tensor w1, Tensor w2, Tensor anchor) -> Tensor",
    outputs=lambda base, *_: [(base.shape[:2], I32)],
    fill=lambda base, w1, w2, anchor, out: Launch(
        (
            base,
            whole(w1, w2.dtype, base.shape[2], w1.shape[1]),
            whole(w2, w2.dtype),
            whole(anchor, I32, base.shape[0]),
            out,
        ),
        (*base.shape, w1.shape[1], *strides(base, 2), matrix(w2, *w1.shape)[2], code(w2), code(base, F32)),
    ),
)

kernel(
    "begin",
    "(Tensor slots, Tensor anchor, Tensor drafts, Tensor position, Tensor limit, int query_len)"
    " -> (Tensor, Tensor, Tensor)",
    outputs=lambda slots, anchor, drafts, position, limit, query_len: [
        ((slots.shape[0], query_len), I32),
        (slots.shape, I32),
        (slots.shape, I32),
    ],
    fill=lambda slots, anchor, drafts, position, limit, query_len, *outs: Launch(
        (whole(slots, I32), whole(anchor, I32), wide_enough(drafts, query_len - 1),
         *(whole(t, I32, anchor.shape[0]) for t in (position, limit)), *outs),
        (slots.shape[0], shaped(anchor, drafts.shape[0]).shape[0], *strides(drafts, 1), query_len, code(drafts, I32)),
    ),
)  # fmt: skip

kernel(
    "accept",
    "(Tensor ids, Tensor greedy, Tensor length, Tensor eos) -> (Tensor, Tensor, Tensor, Tensor)",
    outputs=lambda ids, greedy, length, eos: [(ids.shape, I32), *[(length.shape, I32)] * 3],
    fill=lambda ids, greedy, length, eos, *outs: Launch(
        (ids, shaped(greedy, *ids.shape), *(whole(t, I32, ids.shape[0]) for t in (length, eos)), *outs),
        (*ids.shape, *strides(ids, 1), *strides(greedy, 1), code(ids, I32), code(greedy, I32)),
    ),
)

kernel(
    "commit",
    "(Tensor slots, Tensor tokens, Tensor count, Tensor ended, Tensor(a!) anchor, Tensor(b!) position, Tensor(c!) limit)"
    " -> ()",
    outputs=lambda *_: [],
    fill=lambda slots, tokens, count, ended, anchor, position, limit: Launch(
        (whole(slots, I32), shaped(tokens, slots.shape[0], tokens.shape[1]),
         *(whole(t, I32, slots.shape[0]) for t in (count, ended)),
         *(whole(t, I32, anchor.shape[0]) for t in (anchor, position, limit))),
        (slots.shape[0], anchor.shape[0], tokens.shape[1], *strides(tokens, 1), code(tokens, I32)),
    ),
)  # fmt: skip
