"""Kernels of the model's mathematics: norms, products, hyper-connections, attention, experts. See `plain` for each.

Float inputs may be bf16 or float32 and may be column slices (a row stride larger than the row).
"""

import torch
from torch import Tensor

from dsv4.ops.cpu_call import F32, I8, I32, Launch, code, kernel, strides, whole

PER_PAGE = 32  # CSA entries of a history page

# ---- embeddings, norms, rope ------------------------------------------------------------------------------------------

kernel(
    "embed",
    "(Tensor ids, Tensor table, int streams) -> Tensor",
    outputs=lambda ids, table, streams: [((ids.shape[0], streams, table.shape[1]), F32)],
    fill=lambda ids, table, streams, out: Launch(
        (whole(ids, I32), whole(table, table.dtype), out), (ids.shape[0], *table.shape, streams, code(table))
    ),
)

kernel(
    "rms_norm",
    "(Tensor x, Tensor gamma, float eps) -> Tensor",
    outputs=lambda x, gamma, eps: [(x.shape, F32)],
    fill=lambda x, gamma, eps, out: Launch(
        (x, whole(gamma, gamma.dtype), out), (*x.shape, *strides(x, 1), code(x), code(gamma)), (eps,)
    ),
)

kernel(
    "rope",
    "(Tensor x, Tensor cos_sin, Tensor? gamma, float? eps, ScalarType dtype) -> Tensor",
    outputs=lambda x, cos_sin, gamma, eps, dtype: [(x.shape, dtype)],
    fill=lambda x, cos_sin, gamma, eps, dtype, out: Launch(
        (x, cos_sin, None if gamma is None else whole(gamma, gamma.dtype), out),
        (*x.shape, cos_sin.shape[1], *strides(x, 2), *strides(cos_sin, 1), code(x), code(cos_sin), code(gamma),
         code(dtype), eps is not None),
        (eps or 0.0,),
    ),
)  # fmt: skip

# ---- matrix products --------------------------------------------------------------------------------------------------

kernel(
    "linear",
    "(Tensor x, Tensor w) -> Tensor",
    outputs=lambda x, w: [((x.shape[0], w.shape[0]), F32)],
    fill=lambda x, w, out: Launch(
        (x, w, out), (*x.shape, w.shape[0], *strides(x, 1), *strides(w, 1), code(x), code(w))
    ),
)

kernel(
    "linear_int8",
    "(Tensor x, Tensor values, Tensor scale, int groups) -> Tensor",
    outputs=lambda x, values, scale, groups: [((x.shape[0], values.shape[0]), F32)],
    fill=lambda x, values, scale, groups, out: Launch(
        (x, values, whole(scale, F32), out),
        (*x.shape, values.shape[0], *strides(x, 1), *strides(values, 1), groups, code(x), code(values, I8)),
    ),
)

kernel(
    "grouped_linear",
    "(Tensor x, Tensor w) -> Tensor",
    outputs=lambda x, w: [((x.shape[0], *w.shape[:2]), F32)],
    fill=lambda x, w, out: Launch(
        (x, whole(w, w.dtype), out), (*x.shape, w.shape[1], *strides(x, 2), code(x), code(w))
    ),
)

# ---- hyper-connections --------------------------------------------------------------------------------------------------


def few_streams(streams: Tensor) -> Tensor:
    if not 1 <= streams.shape[1] <= 8:
        raise TypeError(f"CPU kernel: expected 1 to 8 residual streams, got {streams.shape[1]}")
    return streams


kernel(
    "hc_pre",
    "(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor gamma, int iters, float eps, float hc_eps)"
    " -> (Tensor, Tensor, Tensor)",
    outputs=lambda streams, *_: [
        ((streams.shape[0], streams.shape[2]), F32),
        (streams.shape[:2], F32),
        ((*streams.shape[:2], streams.shape[1]), F32),
    ],
    fill=lambda streams, fn, base, scale, gamma, iters, eps, hc_eps, *outs: Launch(
        (*(whole(t, F32) for t in (few_streams(streams), fn, base, scale)), whole(gamma, gamma.dtype), *outs),
        (*streams.shape, iters, code(gamma)),
        (eps, hc_eps),
    ),
)

kernel(
    "hc_post",
    "(Tensor streams, Tensor y, Tensor post, Tensor comb) -> Tensor",
    outputs=lambda streams, *_: [(streams.shape, F32)],
    fill=lambda streams, y, post, comb, out: Launch(
        (whole(few_streams(streams), F32), y, whole(post, F32), whole(comb, F32), out),
        (*streams.shape, *strides(y, 1), code(y)),
    ),
)

kernel(
    "hc_head",
    "(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor gamma, float eps, float hc_eps) -> (Tensor, Tensor)",
    outputs=lambda streams, *_: [((streams.shape[0], streams.shape[2]), F32)] * 2,
    fill=lambda streams, fn, base, scale, gamma, eps, hc_eps, *outs: Launch(
        (*(whole(t, F32) for t in (few_streams(streams), fn, base, scale)), whole(gamma, gamma.dtype), *outs),
        (*streams.shape, code(gamma)),
        (eps, hc_eps),
    ),
)

kernel(
    "taps",
    "(Tensor[] streams) -> Tensor",
    outputs=lambda streams: [((streams[0].shape[0], len(streams) * streams[0].shape[2]), F32)],
    fill=lambda streams, out: Launch((out, *(whole(x, F32) for x in streams)), (*streams[0].shape, len(streams))),
)

# ---- compression and attention ------------------------------------------------------------------------------------------

kernel(
    "compress",
    "(Tensor state, Tensor rows, Tensor gamma, Tensor cos_sin, float eps, ScalarType dtype) -> Tensor",
    outputs=lambda state, rows, gamma, cos_sin, eps, dtype: [((rows.shape[0], gamma.shape[0]), dtype)],
    fill=lambda state, rows, gamma, cos_sin, eps, dtype, out: Launch(
        (whole(state, F32), whole(rows, I32), whole(gamma, gamma.dtype), cos_sin, out),
        (rows.shape[0], state.shape[0], rows.shape[1], gamma.shape[0], state.shape[1], cos_sin.shape[1],
         *strides(cos_sin, 1), code(gamma), code(cos_sin), code(dtype)),
        (eps,),
    ),
)  # fmt: skip

kernel(
    "hadamard_quantise",
    "(Tensor x) -> (Tensor, Tensor)",
    outputs=lambda x: [(x.shape, I8), (x.shape[:2], F32)],
    fill=lambda x, *outs: Launch((x, *outs), (*x.shape, *strides(x, 2), code(x)), (x.shape[2] ** -0.5,)),
)

kernel(
    "index_topk",
    "(Tensor q, Tensor? q_scale, Tensor weights, Tensor keys, Tensor? key_scale, Tensor history, Tensor visible,"
    " int topk, float scale) -> Tensor",
    outputs=lambda q, q_scale, weights, keys, key_scale, history, visible, topk, scale: [
        ((q.shape[0], min(topk, history.shape[1] * PER_PAGE)), I32)
    ],
    fill=lambda q, q_scale, weights, keys, key_scale, history, visible, topk, scale, out: Launch(
        (q, whole(q_scale, F32), weights, whole(keys, keys.dtype), whole(key_scale, F32),
         whole(history, I32), whole(visible, I32), out),
        (*q.shape, keys.shape[0], *history.shape, out.shape[1], *strides(q, 2), *strides(weights, 1),
         code(q, *((I8,) if keys.dtype == I8 else ())), code(keys, F32, torch.bfloat16, I8)),
        (scale,),
    ),
)  # fmt: skip

kernel(
    "attention",
    "(Tensor q, Tensor kv, Tensor kv_rows, Tensor? entries, Tensor? entry_rows, Tensor? entry_count, Tensor sink,"
    " Tensor cos_sin, float scale) -> Tensor",
    outputs=lambda q, *_: [(q.shape, q.dtype)],
    fill=lambda q, kv, kv_rows, entries, entry_rows, entry_count, sink, cos_sin, scale, out: Launch(
        (q, kv, whole(kv_rows, I32), entries, whole(entry_rows, I32), whole(entry_count, I32),
         whole(sink, F32), cos_sin, out),
        (*q.shape, cos_sin.shape[1], *strides(q, 2), *strides(cos_sin, 1), kv.shape[0], *strides(kv, 1), *kv_rows.shape,
         *((0, 0, 1, 0) if entries is None else (entries.shape[0], *strides(entries, 1), *entry_rows.shape)),
         code(cos_sin), code(q, kv.dtype)),
        (scale,),
    ),
)  # fmt: skip

# ---- mixture of experts -------------------------------------------------------------------------------------------------

kernel(
    "route",
    "(Tensor x, Tensor gate, Tensor bias, Tensor positions, int k, float scale) -> (Tensor, Tensor)",
    outputs=lambda x, gate, bias, positions, k, scale: [((x.shape[0], k), I32), ((x.shape[0], k), F32)],
    fill=lambda x, gate, bias, positions, k, scale, *outs: Launch(
        (x, whole(gate, F32), whole(bias, F32), whole(positions, I32), *outs),
        (*x.shape, gate.shape[0], k, *strides(x, 1), code(x)),
        (scale,),
    ),
)

kernel(
    "route_hash",
    "(Tensor x, Tensor gate, Tensor tid2eid, Tensor ids, Tensor positions, float scale) -> (Tensor, Tensor)",
    outputs=lambda x, gate, tid2eid, *_: [((x.shape[0], tid2eid.shape[1]), dtype) for dtype in (I32, F32)],
    fill=lambda x, gate, tid2eid, ids, positions, scale, *outs: Launch(
        (x, whole(gate, F32), whole(tid2eid, I32), whole(ids, I32), whole(positions, I32), *outs),
        (*x.shape, gate.shape[0], tid2eid.shape[1], tid2eid.shape[0], *strides(x, 1), code(x)),
        (scale,),
    ),
)


def _fill_moe(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, limit: float, first: int, out: Tensor,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Launch:  # fmt: skip
    d, experts = x.shape[1], w2.shape[0]
    return Launch(
        (x, whole(ids, I32), whole(weights, F32), whole(w13, w2.dtype), whole(w2, w2.dtype), *scales, out),
        (*ids.shape, d, w2.shape[2], experts, first, *strides(x, 1), code(x), code(w2, F32, torch.bfloat16, I8)),
        (limit,),
    )


kernel(
    "moe",
    "(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, float limit, int first) -> Tensor",
    outputs=lambda x, *_: [(x.shape, F32)],
    fill=_fill_moe,
)

kernel(
    "moe_int8",
    "(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor s13, Tensor w2, Tensor s2, float limit, int first)"
    " -> Tensor",
    outputs=lambda x, *_: [(x.shape, F32)],
    fill=lambda x, ids, weights, w13, s13, w2, s2, limit, first, out: _fill_moe(
        x, ids, weights, w13, w2, limit, first, out, (whole(s13, F32), whole(s2, F32))
    ),
)
