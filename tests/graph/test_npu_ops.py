"""The NPU op table against the definitions, on CPU kernels that follow torch_npu's documents.

Tolerances: float32 paths 1e-5; one rounding to bf16 where the table says so is 2^-8 relative; int8 after such a rounding may
move by one step of amax/127, and products of that by the same fraction.
"""

import pytest
import torch

from dsv4.ops import npu, npu_attention, npu_hyper, npu_moe, plain
from dsv4.ops.npu_params import Packed, _by_group, pack, pack_experts
from dsv4.tree import QuantWeight
from tests.support.npu_kernels import install

install()
OPS = npu.npu_ops(8, plugins={})


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(high: int, *shape: int, seed: int = 0, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def quantised(*shape: int, seed: int = 0) -> QuantWeight:
    q, scale = plain.quantise(rand(*shape, seed=seed) * 0.1)
    return QuantWeight(values=q, scale=scale.squeeze(-1))


def close(got, expected, tolerance: float) -> None:
    """Differences relative to the expected tensor's size."""
    for a, b in zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]:
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a.float() - b.float()).abs().max() <= tolerance * max(b.float().abs().max(), 1e-6)


def test_embed_take_and_norms() -> None:
    table, ids = rand(50, 16, dtype=torch.bfloat16), ints(50, 9)
    close(OPS.embed(ids, table, 4), plain.embed(ids, table, 4), 0)
    rows = ints(50, 3, 5, low=-1)
    close(OPS.take(table, rows.flatten()), plain.take(table, rows.flatten()), 0)
    close(OPS.take(table[:, 0], rows.flatten()), plain.take(table[:, 0], rows.flatten()), 0)
    x, gamma = rand(9, 16), rand(16, seed=1, dtype=torch.bfloat16)
    close(OPS.rms_norm(x, gamma.float(), 1e-6), plain.rms_norm(x, gamma, 1e-6), 1e-6)


@pytest.mark.parametrize(("weighted", "eps"), [(True, 1e-6), (False, 1e-6), (False, None)])
def test_rope(weighted: bool, eps: float | None) -> None:
    x, table = rand(12, 3, 32), rand(12, 16, seed=1, dtype=torch.bfloat16)
    gamma = rand(32, seed=2, dtype=torch.bfloat16) if weighted else None
    mine = gamma.float() if weighted else None
    close(OPS.rope(x, table, mine, eps, torch.bfloat16), plain.rope(x, table, gamma, eps, torch.bfloat16), 2**-8)
    close(OPS.rope(x, table, mine, eps, torch.float32), plain.rope(x, table, gamma, eps, torch.float32), 1e-6)


def test_linear_bf16_keeps_float32_products() -> None:
    x, w = rand(9, 64), rand(24, 64, seed=1, dtype=torch.bfloat16)
    close(OPS.linear(x, pack(w)), plain.linear(x, w), 1e-6)
    assert pack(w).shape == w.shape and pack(w)[4:7].shape == w[4:7].shape
    close(OPS.linear(x, pack(w)[4:7]), plain.linear(x, w[4:7]), 1e-6)


@pytest.mark.parametrize("groups", [1, 2])
def test_linear_int8(groups: int) -> None:
    x, w = rand(9, 64).bfloat16().float(), quantised(24, 64)
    mine = pack(w) if groups == 1 else _by_group(w, groups)
    tolerance = 2**-8 if groups == 1 else 1e-5  # int32 until the groups are summed
    close(OPS.linear(x, mine, groups), plain.linear(x, w, groups), tolerance)


def test_grouped_linear() -> None:
    x, w = rand(9, 2, 32), rand(2, 24, 32, seed=1, dtype=torch.bfloat16)
    close(OPS.grouped_linear(x, pack(w)), plain.grouped_linear(x, w), 2**-8)


def hyper(channels: int, d: int, m: int = 4) -> tuple:
    fn, base, gamma = rand(channels, m * d, seed=1) * 0.2, rand(channels, seed=2), rand(d, seed=4, dtype=torch.bfloat16)
    return fn, base, gamma


def test_hyper_connections() -> None:
    streams, (fn, base, gamma) = rand(9, 4, 32) * 3, hyper(24, 32)
    scale = torch.tensor([0.7, 1.3, 2.0])
    spread = scale.repeat_interleave(torch.tensor([4, 4, 16])).unsqueeze(1)
    got = OPS.hc_pre(streams, pack(fn * spread), base, scale, gamma.float(), 20, 1e-6, 1e-6)
    expected = plain.hc_pre(streams, fn, base, scale, gamma, 20, 1e-6, 1e-6)
    close(got[1:], expected[1:], 1e-5)
    close(got[0], expected[0], 2**-8)
    y = rand(9, 32, seed=5)
    close(OPS.hc_post(streams, y, *expected[1:]), plain.hc_post(streams, y, *expected[1:]), 1e-6)


def test_hyper_head() -> None:
    streams, (fn, base, gamma), scale = rand(9, 4, 32), hyper(4, 32), torch.tensor([1.5])
    got = OPS.hc_head(streams, pack(fn * scale), base, scale, gamma.float(), 1e-6, 1e-6)
    close(got, plain.hc_head(streams, fn, base, scale, gamma, 1e-6, 1e-6), 2**-8)


@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
@pytest.mark.parametrize("m", [2, 4])
def test_sinkhorn_values(spread: float, m: int) -> None:
    cells = (rand(33, m, m) * spread).softmax(-1) + 1e-6
    expected = cells / (cells.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        expected = expected / (expected.sum(2, keepdim=True) + 1e-6)
        expected = expected / (expected.sum(1, keepdim=True) + 1e-6)
    assert (npu_hyper.sinkhorn(cells, 20, 1e-6) - expected).abs().max() < 1e-5


def test_scatter_and_state() -> None:
    for dtype, tail in ((torch.bfloat16, (8,)), (torch.float32, ()), (torch.int32, ()), (torch.int32, (7,))):
        slots, rows = torch.tensor([3, 7, 1], dtype=torch.int32), ints(99, 3, *tail)
        mine, theirs = torch.zeros(9, *tail, dtype=dtype), torch.zeros(9, *tail, dtype=dtype)
        assert OPS.scatter(mine, slots, rows) is mine
        assert torch.equal(mine, plain.scatter(theirs, slots, rows))
    ape, positions = rand(4, 16, seed=2), torch.tensor([4, 5, -1], dtype=torch.int32)
    wide = torch.cat([torch.zeros(4, 16), ape], 1)
    got = OPS.write_state(torch.zeros(9, 32), slots, rand(3, 32), wide, positions)
    assert torch.equal(got, plain.write_state(torch.zeros(9, 32), slots, rand(3, 32), ape, positions))


@pytest.mark.parametrize(("overlap", "m"), [(True, 8), (False, 128)])
def test_compress(overlap: bool, m: int) -> None:
    d = 32
    state, gamma, table = rand(200, (4 if overlap else 2) * d), rand(d, seed=1), rand(3, 16, seed=2)
    rows = ints(200, 3, m)
    rows[1, : m // 2] = -1
    rows[2] = -1
    got = OPS.compress(state, rows, gamma, table, 1e-6, torch.float32)
    expected = plain.compress(state, rows, gamma, table, 1e-6, torch.float32)
    close(got[:2], expected[:2], 1e-5)
    assert got[2].isfinite().all()  # a window that does not close


def test_hadamard_quantise() -> None:
    x = rand(5, 3, 128).bfloat16()
    q, scale = OPS.hadamard_quantise(x)
    expected, expected_scale = plain.hadamard_quantise(x)
    assert (q.int() - expected.int()).abs().max() <= 1 and (q != expected).float().mean() < 0.01
    close(scale, expected_scale, 2**-7)


def index_case(dim: int, heads: int, pages: int, visible: list[int]):
    rows, q_len = len(visible) // 2, 2
    q, q_scale = plain.hadamard_quantise(rand(rows * q_len, heads, dim))
    keys, key_scale = plain.hadamard_quantise(rand(32 * 40, 1, dim, seed=1))
    history = torch.randperm(40, generator=torch.Generator().manual_seed(2))[: rows * pages].to(torch.int32)
    return (q, q_scale, rand(rows * q_len, heads, seed=3), keys.squeeze(1), key_scale.squeeze(1),
            history.view(rows, pages), torch.tensor(visible, dtype=torch.int32))  # fmt: skip


@pytest.mark.parametrize("dim", [16, 128])
def test_index_topk(dim: int) -> None:
    """dim 128 takes the fused kernel with its float16 scales: near ties at the cut may differ, nothing else."""
    args = index_case(dim, 16, 8, [200, 201, 3, 4])
    got, expected = OPS.index_topk(*args, 24, 0.01), plain.index_topk(*args, 24, 0.01)
    for mine, theirs in zip(got.tolist(), expected.tolist(), strict=True):
        assert len(set(mine) ^ set(theirs)) <= (2 if dim == 128 else 0)
    assert torch.equal(got.sort(-1).values[2], expected.sort(-1).values[2])


def test_index_topk_of_few_entries_needs_no_scores() -> None:
    args = index_case(16, 16, 2, [40, 41, 0, 1])
    assert torch.equal(OPS.index_topk(*args, 512, 0.01), plain.index_topk(*args, 512, 0.01))


def attention_case(kind: str, dtype: torch.dtype):
    rows, q_len, heads, d, width = 3, 8, 2, 32, 24
    q = rand(rows * q_len, heads, d, dtype=dtype)
    kv, entries = rand(400, d, seed=1, dtype=dtype), rand(300, d, seed=2, dtype=dtype)
    # windows of consecutive queries over a ring of consecutive rows; the first row starts at position 0
    start = torch.tensor([0, 90, 200], dtype=torch.int32)
    seen = start.view(-1, 1, 1) + torch.arange(q_len).view(-1, 1) + torch.arange(1 - width, 1)
    kv_rows = torch.where(seen >= 0, seen, -1).to(torch.int32)
    kv_rows[1, 5:] = -1  # padding queries
    kv_rows = kv_rows.flatten(0, 1)
    count = ints(20, rows * q_len, seed=4)
    if kind == "swa":
        more = (None, None, None)
    elif kind == "hca":
        more = (entries, ints(300, rows, 20, seed=3), count)
    elif kind == "csa":
        chosen = ints(300, rows * q_len, 16, seed=3)
        chosen[4, 9:] = -1
        more = (entries, chosen, count.clamp(max=16))
    else:
        kv_rows = kv_rows[::q_len].contiguous()
        more = (entries, torch.arange(rows * q_len, dtype=torch.int32).view(rows, q_len), None)
    return (q, kv, kv_rows, *more, rand(heads, seed=5), rand(rows * q_len, 16, seed=6, dtype=dtype), d**-0.5)


@pytest.mark.parametrize("kind", ["swa", "hca", "csa", "draft"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_attention(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    args = attention_case(kind, dtype)
    got, expected = OPS.attention(*args), plain.attention(*args)
    live = torch.ones(24, dtype=torch.bool)
    live[13:16] = kind == "draft"
    close(got[live], expected[live], tolerance)
    assert got.isfinite().all()


def test_attention_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("swa", "hca", "csa", "draft"):
        args = attention_case(kind, torch.float32)
        whole = OPS.attention(*args)
        monkeypatch.setattr(npu_attention, "TILE_TOKENS", 8)
        assert (OPS.attention(*args) - whole).abs().max() < 1e-6
        monkeypatch.undo()


def test_routes() -> None:
    x, gate, bias = rand(9, 32) * 2, rand(16, 32, seed=1), rand(16, seed=2)
    positions = torch.tensor([0, 1, 2, 3, -1, 5, 6, -1, 8], dtype=torch.int32)
    live = positions >= 0
    ids, weights = OPS.route(x, pack(gate), bias, positions, 3, 1.5)
    expected = plain.route(x, gate, bias, positions, 3, 1.5)
    assert torch.equal(ids[live], expected[0][live])
    close(weights[live], expected[1][live], 1e-6)
    assert (ids >= 0).all() and not weights[~live].any()
    table, tokens = ints(16, 50, 3, seed=3), ints(50, 9, seed=4)
    ids, weights = OPS.route_hash(x, pack(gate), table, tokens, positions, 1.5)
    expected = plain.route_hash(x, gate, table, tokens, positions, 1.5)
    assert torch.equal(ids[live], expected[0][live])
    close(weights[live], expected[1][live], 1e-6)


@pytest.mark.parametrize("exchange", [False, True])
def test_experts(exchange: bool) -> None:
    experts, d, inner = 8, 64, 64
    w13, w2 = quantised(experts + 1, 2 * inner, d, seed=1), quantised(experts + 1, d, inner, seed=2)
    x, ids, weights = rand(19, d).bfloat16().float(), ints(experts, 19, 3), rand(19, 3, seed=3).abs()
    fn = npu_moe.exchanging_moe("group", 1, 0) if exchange else OPS.moe
    got = fn(x, ids, weights, pack_experts(w13), pack_experts(w2), 10.0, 0)
    assert got.dtype == (torch.bfloat16 if exchange else torch.float32)
    close(got.float(), plain.moe(x, ids, weights, w13, w2, 10.0, 0), 2**-7)


def test_float_experts_are_refused() -> None:
    with pytest.raises(TypeError, match="W8A8"):
        pack_experts(rand(3, 8, 8))


def test_tokens() -> None:
    base, w1, w2 = (
        rand(4, 7, 60),
        rand(60, 16, seed=1, dtype=torch.bfloat16),
        rand(60, 16, seed=2, dtype=torch.bfloat16),
    )
    anchor = ints(60, 4)
    assert torch.equal(OPS.markov(base, w1, pack(w2), anchor), plain.markov(base, w1, w2, anchor))
    state = [ints(60, 6, seed=s) for s in (3, 4, 5)]
    other = [x.clone() for x in state]
    args = (torch.tensor([2, 0, 5, 5], dtype=torch.int32), ints(60, 4, 8), torch.tensor([3, 8, 0, 0], dtype=torch.int32),
            torch.tensor([0, 1, 0, 0], dtype=torch.int32))  # fmt: skip
    OPS.commit(*args, *state)
    plain.commit(*args, *other)
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


def test_simplified_graphs_compute_the_same() -> None:
    """The passes that NPU compilers run first, on a function with round trips, chained views and repeated work."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from dsv4.graph.ge_passes import simplify_fx

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rounded = x.bfloat16().float().unsqueeze(1).flatten(0, 1).bfloat16()
        rows = x.view(3, 4, 8).flatten(0, 1).unsqueeze(0).squeeze(0)
        return rounded, rows * 2, rows * 2 + 1, x.t().reshape(-1), npu_hyper.sinkhorn(w, 3, 1e-6), *w.split([4, 0], 1)

    args = (rand(12, 8), rand(5, 4, 4, seed=1).abs())
    gm = make_fx(fn, tracing_mode="fake")(*args)
    before = len(gm.graph.nodes)
    simplify_fx(gm)
    assert len(gm.graph.nodes) < before
    for got, expected in zip(gm(*args), fn(*args), strict=True):
        assert torch.equal(got, expected)


def test_plugins_replace_operators() -> None:
    table = npu.npu_ops(8, plugins={"hc_pre": max})
    assert table.hc_pre is max and table.hc_post is OPS.hc_post


def test_packed_is_a_tree() -> None:
    packed = pack(quantised(6, 4))
    assert packed.shape == (6, 4) and packed.dtype == torch.int8
    assert torch.utils._pytree.tree_map(lambda t: t, packed).scale is packed.scale
    assert isinstance(packed, Packed)
