"""Kernels of the model's mathematics: norms, products, hyper-connections, attention, experts. See `plain` for each.

Float inputs may be bf16 or float32 and may be column slices (a row stride larger than the row).
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.ops.cpu_call import F32, I8, I32, Launch, code, kernel, matrix, shaped, strides, whole, width

PER_PAGE = 32  # CSA entries of a history page

# ---- embeddings, norms, rope ------------------------------------------------------------------------------------------

kernel(
    "embed",
    "(Tensor ids, Tensor table, int streams) -> Tensor",
    rows="ids",
    outputs=lambda ids, table, streams: [((ids.shape[0], streams, table.shape[1]), F32)],
    fill=lambda ids, table, streams, out: Launch(
        (whole(ids, I32), whole(table, table.dtype), out), (ids.shape[0], *table.shape, streams, code(table))
    ),
)

kernel(
    "rms_norm",
    "(Tensor x, Tensor gamma, float eps) -> Tensor",
    rows="x",
    outputs=lambda x, gamma, eps: [(x.shape, F32)],
    fill=lambda x, gamma, eps, out: Launch(
        (x, whole(gamma, gamma.dtype, x.shape[1]), out), (*x.shape, *strides(x, 1), code(x), code(gamma)), (eps,)
    ),
)

kernel(
    "rope",
    "(Tensor x, Tensor cos_sin, Tensor? gamma, float? eps, ScalarType dtype) -> Tensor",
    rows="x cos_sin",
    outputs=lambda x, cos_sin, gamma, eps, dtype: [(x.shape, dtype)],
    fill=lambda x, cos_sin, gamma, eps, dtype, out: Launch(
        (x, shaped(cos_sin, x.shape[0], cos_sin.shape[1]), None if gamma is None else whole(gamma, gamma.dtype, x.shape[2]), out),
        (*x.shape, cos_sin.shape[1], *strides(x, 2), *strides(cos_sin, 1), code(x), code(cos_sin), code(gamma),
         code(dtype), eps is not None),
        (eps or 0.0,),
    ),
)  # fmt: skip

# ---- matrix products --------------------------------------------------------------------------------------------------


def _fill_linear(x: Tensor, w: Tensor, out: Tensor) -> Launch:
    w, *layout = matrix(w, out.shape[1], x.shape[1])
    return Launch((x, w, out), (*x.shape, out.shape[1], *strides(x, 1), *layout, code(x), code(w)))


def _fill_linear_int8(x: Tensor, values: Tensor, scale: Tensor, groups: int, out: Tensor) -> Launch:
    values, *layout = matrix(values, scale.shape[0], x.shape[1])
    code(values, I8)
    return Launch(
        (x, values, whole(scale, F32), out), (*x.shape, out.shape[1], *strides(x, 1), *layout, groups, code(x))
    )


def _fill_grouped(x: Tensor, w: Tensor, out: Tensor) -> Launch:
    w, _, panels = matrix(whole(w, w.dtype), x.shape[1], out.shape[2], x.shape[2])
    return Launch((x, w, out), (*x.shape, out.shape[2], *strides(x, 2), panels, code(x), code(w)))


kernel(
    "linear",
    "(Tensor x, Tensor w) -> Tensor",
    rows="x",
    weights="w",
    outputs=lambda x, w: [((x.shape[0], width(w)), F32)],
    fill=_fill_linear,
)

kernel(
    "linear_int8",
    "(Tensor x, Tensor values, Tensor scale, int groups) -> Tensor",
    rows="x",
    weights="values",
    outputs=lambda x, values, scale, groups: [((x.shape[0], scale.shape[0]), F32)],
    fill=_fill_linear_int8,
)

kernel(
    "grouped_linear",
    "(Tensor x, Tensor w) -> Tensor",
    rows="x",
    weights="w",
    outputs=lambda x, w: [((x.shape[0], x.shape[1], width(w, 1)), F32)],
    fill=_fill_grouped,
)

# ---- hyper-connections --------------------------------------------------------------------------------------------------


def _streams(streams: Tensor) -> Tensor:
    if not 1 <= streams.shape[1] <= 8:
        raise TypeError(f"CPU kernel: expected 1 to 8 residual streams, got {streams.shape[1]}")
    return whole(streams, F32)


def _fill_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    gamma: Tensor,
    *rest: Any,
    rows: int,
    scales: int,
    ints: int,
) -> Launch:
    """hc_pre and hc_head; `rest` is `ints` integers, two floats, then the outputs."""
    m, d = streams.shape[1:]
    weights = (whole(fn, F32, rows, m * d), whole(base, F32, rows), whole(scale, F32, scales))
    floats, outs = rest[ints : ints + 2], rest[ints + 2 :]
    return Launch(
        (_streams(streams), *weights, whole(gamma, gamma.dtype, d), *outs),
        (*streams.shape, *rest[:ints], code(gamma)),
        floats,
    )


kernel(
    "hc_pre",
    "(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor gamma, int iters, float eps, float hc_eps)"
    " -> (Tensor, Tensor, Tensor)",
    rows="streams",
    weights="fn",
    outputs=lambda streams, *_: [
        ((streams.shape[0], streams.shape[2]), F32),
        (streams.shape[:2], F32),
        ((*streams.shape[:2], streams.shape[1]), F32),
    ],
    fill=lambda streams, *args: _fill_mix(
        streams, *args, rows=(2 + streams.shape[1]) * streams.shape[1], scales=3, ints=1
    ),
)

kernel(
    "hc_post",
    "(Tensor streams, Tensor y, Tensor post, Tensor comb) -> Tensor",
    rows="streams y post comb",
    outputs=lambda streams, *_: [(streams.shape, F32)],
    fill=lambda streams, y, post, comb, out: Launch(
        (_streams(streams), shaped(y, streams.shape[0], streams.shape[2]), whole(post, F32, *streams.shape[:2]),
         whole(comb, F32, *streams.shape[:2], streams.shape[1]), out),
        (*streams.shape, *strides(y, 1), code(y)),
    ),
)  # fmt: skip

kernel(
    "hc_head",
    "(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor gamma, float eps, float hc_eps) -> (Tensor, Tensor)",
    rows="streams",
    weights="fn",
    outputs=lambda streams, *_: [((streams.shape[0], streams.shape[2]), F32)] * 2,
    fill=lambda streams, *args: _fill_mix(streams, *args, rows=streams.shape[1], scales=1, ints=0),
)

kernel(
    "taps",
    "(Tensor[] streams) -> Tensor",
    rows="streams",
    outputs=lambda streams: [((streams[0].shape[0], len(streams) * streams[0].shape[2]), F32)],
    fill=lambda streams, out: Launch(
        (out, *(whole(x, F32, *streams[0].shape) for x in streams)), (*streams[0].shape, len(streams))
    ),
)

# ---- compression and attention ------------------------------------------------------------------------------------------


def _fill_compress(
    state: Tensor, rows: Tensor, gamma: Tensor, cos_sin: Tensor, eps: float, dtype: torch.dtype, out: Tensor
) -> Launch:
    (n, m), d, r = rows.shape, gamma.shape[0], cos_sin.shape[1]
    width = 4 * d if state.shape[1] == 4 * d else 2 * d
    return Launch(
        (
            whole(state, F32, state.shape[0], width),
            whole(rows, I32),
            whole(gamma, gamma.dtype),
            shaped(cos_sin, n, r),
            out,
        ),
        (n, state.shape[0], m, d, width, r, *strides(cos_sin, 1), code(gamma), code(cos_sin), code(dtype)),
        (eps,),
    )


kernel(
    "compress",
    "(Tensor state, Tensor rows, Tensor gamma, Tensor cos_sin, float eps, ScalarType dtype) -> Tensor",
    rows="rows cos_sin",
    outputs=lambda state, rows, gamma, cos_sin, eps, dtype: [((rows.shape[0], gamma.shape[0]), dtype)],
    fill=_fill_compress,
)

kernel(
    "hadamard_quantise",
    "(Tensor x) -> (Tensor, Tensor)",
    rows="x",
    outputs=lambda x: [(x.shape, I8), (x.shape[:2], F32)],
    fill=lambda x, *outs: Launch((x, *outs), (*x.shape, *strides(x, 2), code(x)), (x.shape[2] ** -0.5,)),
)


def _fill_index(
    q: Tensor, q_scale: Tensor | None, weights: Tensor, keys: Tensor, key_scale: Tensor | None, history: Tensor,
    visible: Tensor, topk: int, scale: float, out: Tensor,
) -> Launch:  # fmt: skip
    n, heads, d = q.shape
    int8 = keys.dtype == I8
    if keys.shape[0] % PER_PAGE:
        raise TypeError(f"CPU kernel: expected index keys in whole pages of {PER_PAGE}, got {keys.shape[0]} rows")
    if int8 and d > 1024:
        raise TypeError(f"CPU kernel: expected at most 1024 index channels (exact int8 sums), got {d}")
    return Launch(
        (q, whole(q_scale, F32, n, heads), shaped(weights, n, heads), whole(keys, keys.dtype, keys.shape[0], d),
         whole(key_scale, F32, keys.shape[0]), whole(history, I32, _lead(history, n), history.shape[1]),
         whole(visible, I32, n), out),
        (n, heads, d, keys.shape[0], *history.shape, out.shape[1], *strides(q, 2), *strides(weights, 1),
         code(q, *((I8,) if int8 else ())), code(keys, F32, torch.bfloat16, I8), code(weights, F32)),
        (scale,),
    )  # fmt: skip


def _lead(rows: Tensor, tokens: int) -> int:
    """The leading size of a table that holds a line per token or per row of consecutive tokens."""
    if not rows.shape[0] or tokens % rows.shape[0]:
        raise TypeError(f"CPU kernel: expected a table whose {rows.shape[0]} lines divide {tokens} tokens")
    return rows.shape[0]


kernel(
    "index_topk",
    "(Tensor q, Tensor? q_scale, Tensor weights, Tensor keys, Tensor? key_scale, Tensor history, Tensor visible,"
    " int topk, float scale) -> Tensor",
    rows="q q_scale weights visible",
    lines="history",
    outputs=lambda q, q_scale, weights, keys, key_scale, history, visible, topk, scale: [
        ((q.shape[0], min(topk, history.shape[1] * PER_PAGE)), I32)
    ],
    fill=_fill_index,
)


def _fill_attention(
    q: Tensor, kv: Tensor, kv_rows: Tensor, entries: Tensor | None, entry_rows: Tensor | None, entry_count: Tensor | None,
    sink: Tensor, cos_sin: Tensor, scale: float, out: Tensor,
) -> Launch:  # fmt: skip
    n, heads, d = q.shape
    pools = [(kv, kv_rows)] if entries is None else [(kv, kv_rows), (entries, entry_rows)]
    sizes: list[int] = []
    for pool, rows in pools:
        sizes += [shaped(pool, pool.shape[0], d).shape[0], *strides(pool, 1), _lead(rows, n), rows.shape[1]]
        code(pool, q.dtype)
    return Launch(
        (q, kv, whole(kv_rows, I32), entries, whole(entry_rows, I32), whole(entry_count, I32, n), whole(sink, F32, heads),
         shaped(cos_sin, n, cos_sin.shape[1]), out),
        (n, heads, d, cos_sin.shape[1], *strides(q, 2), *strides(cos_sin, 1), *sizes, *((0, 0, 1, 0) if entries is None else ()),
         code(cos_sin), code(q)),
        (scale,),
    )  # fmt: skip


kernel(
    "attention",
    "(Tensor q, Tensor kv, Tensor kv_rows, Tensor? entries, Tensor? entry_rows, Tensor? entry_count, Tensor sink,"
    " Tensor cos_sin, float scale) -> Tensor",
    rows="q entry_count cos_sin",
    lines="kv_rows entry_rows",
    outputs=lambda q, *_: [(q.shape, q.dtype)],
    fill=_fill_attention,
)

# ---- mixture of experts -------------------------------------------------------------------------------------------------

kernel(
    "route",
    "(Tensor x, Tensor gate, Tensor bias, Tensor positions, int k, float scale) -> (Tensor, Tensor)",
    rows="x positions",
    weights="gate",
    outputs=lambda x, gate, bias, positions, k, scale: [((x.shape[0], k), I32), ((x.shape[0], k), F32)],
    fill=lambda x, gate, bias, positions, k, scale, *outs: Launch(
        (x, whole(gate, F32), whole(bias, F32), whole(positions, I32, x.shape[0]), *outs),
        (*x.shape, *bias.shape, k, *strides(x, 1), code(x), *matrix(gate, *bias.shape, x.shape[1])[1:]),
        (scale,),
    ),
)

kernel(
    "route_hash",
    "(Tensor x, Tensor gate, Tensor tid2eid, Tensor ids, Tensor positions, float scale) -> (Tensor, Tensor)",
    rows="x ids positions", weights="gate",
    outputs=lambda x, gate, tid2eid, *_: [((x.shape[0], tid2eid.shape[1]), dtype) for dtype in (I32, F32)],
    fill=lambda x, gate, tid2eid, ids, positions, scale, *outs: Launch(
        (x, whole(gate, F32), whole(tid2eid, I32), whole(ids, I32, x.shape[0]), whole(positions, I32, x.shape[0]), *outs),
        (*x.shape, width(gate), tid2eid.shape[1], tid2eid.shape[0], *strides(x, 1), code(x),
         *matrix(gate, width(gate), x.shape[1])[1:]),
        (scale,),
    ),
)  # fmt: skip


def _fill_moe(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, first: int, out: Tensor,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Launch:  # fmt: skip
    (n, d), experts, f = x.shape, w2.shape[0], width(w13, 1) // 2
    w13, _, panels = matrix(whole(w13, w2.dtype), experts, 2 * f, d)
    w2, _, same = matrix(whole(w2, w2.dtype), experts, d, f)
    if panels != same:
        raise TypeError("CPU kernel: expected w13 and w2 in one layout, got one in panels and one not")
    s13, s2 = whole(scales[0], F32, experts, 2 * f), whole(scales[1], F32, experts, d)
    return Launch(
        (x, whole(ids, I32, n, ids.shape[1]), whole(weights, F32, *ids.shape), w13, w2, s13, s2, out),
        (
            *ids.shape,
            d,
            f,
            experts,
            first,
            *strides(x, 1),
            code(x),
            code(w2, *((I8,) if s2 is not None else ())),
            panels,
        ),
        (limit,),
    )


kernel(
    "moe",
    "(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, float limit, int first) -> Tensor",
    rows="x ids weights",
    weights="w13 w2",
    outputs=lambda x, *_: [(x.shape, F32)],
    fill=_fill_moe,
)

kernel(
    "moe_int8",
    "(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor s13, Tensor w2, Tensor s2, float limit, int first)"
    " -> Tensor",
    rows="x ids weights",
    weights="w13 w2",
    outputs=lambda x, *_: [(x.shape, F32)],
    fill=lambda x, ids, weights, w13, s13, w2, s2, limit, first, out: _fill_moe(
        x, ids, weights, w13, w2, limit, first, out, (s13, s2)
    ),
)
