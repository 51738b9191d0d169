"""Every fused CPU kernel equals its plain definition: floats to 1e-5, int8 sums and integers exactly."""

import pytest
import torch
from torch import Tensor

from dsv4.errors import PlatformError
from dsv4.ops.cpu import cpu_ops
from dsv4.ops.cpu_params import Panels, pack, unpack
from dsv4.ops.table import PLAIN
from dsv4.tree import QuantWeight

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32


@pytest.fixture(scope="module")
def ops():
    try:
        return cpu_ops()
    except PlatformError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def near(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance` of the greatest value; where results are rounded to bf16, to one step of that."""
    assert got.shape == want.shape and got.dtype == want.dtype
    tolerance = max(tolerance, 2.0**-7) if got.dtype == BF16 else tolerance
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= tolerance * max(want.abs().max().item(), 1e-30)


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True) if isinstance(want, (tuple, list)) else [(got, want)]:
        assert a.dtype == b.dtype and torch.equal(a, b)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32)


def sliced(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Random columns out of a wider matrix: rows are not adjacent."""
    return torch.randn(shape[0], *shape[1:-1], shape[-1] + 3)[..., 2:-1].to(dtype)


def quantised(*shape: int) -> QuantWeight:
    values = torch.randint(-127, 128, shape, dtype=torch.int8)
    return QuantWeight(values=values, scale=torch.rand(shape[:-1]) * 0.01 + 1e-3)


# ---- panels -----------------------------------------------------------------------------------------------------------

FORMS = {"f32": torch.randn, "bf16": lambda *shape: torch.randn(*shape).to(BF16), "int8": quantised}
form = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


@form
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 33, 130])
@pytest.mark.parametrize(("k", "n"), [(16, 16), (48, 32), (128, 80), (256, 528)])
def test_panels_give_the_bits_of_plain_rows(ops, make, rows, k, n):
    x, w = torch.randn(rows, k), make(n, k)
    packed = pack(w)
    assert isinstance(packed, Panels) and packed.shape == w.shape
    same(ops.linear(x, packed), ops.linear(x, w))
    if isinstance(w, QuantWeight):
        same(ops.linear(x, pack(w, 4), 4), ops.linear(x, w, 4))
    else:
        same(ops.linear(x, packed[16:]), ops.linear(x, w[16:])) if n > 16 else None
        groups = make(2, n, k)
        same(ops.grouped_linear(x.view(rows, 1, k).repeat(1, 2, 1), pack(groups)),
             ops.grouped_linear(x.view(rows, 1, k).repeat(1, 2, 1), groups))  # fmt: skip


@form
@pytest.mark.parametrize("rows", [1, 5, 8, 70])
def test_panels_of_experts_routers_and_markov(ops, make, rows):
    x, ids, weights = moe_case(rows, 64, 48, 16, 3)
    w13, w2 = make(17, 96, 64), make(17, 64, 48)
    same(ops.moe(x, ids, weights, pack(w13), pack(w2), 2.0, 0), ops.moe(x, ids, weights, w13, w2, 2.0, 0))
    gate, bias, positions = torch.randn(16, 64), torch.randn(16), torch.arange(rows, dtype=I32)
    same(ops.route(x, pack(gate), bias, positions, 3, 1.5), ops.route(x, gate, bias, positions, 3, 1.5))
    table, tokens = torch.randint(0, 16, (9, 3), dtype=I32), torch.randint(0, 9, (rows,), dtype=I32)
    same(
        ops.route_hash(x, pack(gate), table, tokens, positions, 1.5),
        ops.route_hash(x, gate, table, tokens, positions, 1.5),
    )
    base, w1, anchor = torch.randn(rows, 7, 544), torch.randn(544, 32), torch.zeros(rows, dtype=I32)
    w2 = torch.randn(544, 32)
    same(ops.markov(base, w1, pack(w2), anchor), ops.markov(base, w1, w2, anchor))


@form
def test_panels_go_back_to_plain_rows(make):
    w = make(3, 32, 48)
    same(list(vars(unpack(pack(w))).values()) if isinstance(w, QuantWeight) else unpack(pack(w)),
         list(vars(w).values()) if isinstance(w, QuantWeight) else w)  # fmt: skip


def test_what_has_no_panels_stays_plain(ops):
    for w in (torch.randn(24, 64), torch.randn(32, 40), torch.randn(32, 64, dtype=torch.float64)):
        assert pack(w) is w
    w = quantised(32, 48)
    assert pack(w, 8) is w  # groups of 6 channels
    with pytest.raises(TypeError, match="whole panels"):
        pack(torch.randn(32, 16))[8:24]
    with pytest.raises(TypeError, match="one layout"):
        ops.moe(*moe_case(2, 64, 48, 16, 3), pack(torch.randn(17, 96, 64)), torch.randn(17, 64, 48), 2.0, 0)


# ---- embeddings, norms, rope ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_embed_and_take(ops, dtype):
    table, ids = torch.randn(50, 20).to(dtype), ints(3, 49, 0, 7)
    same(ops.embed(ids, table, 4), PLAIN.embed(ids, table, 4))
    rows = ints(3, -1, 49)
    for source in (table, table[:, :5], torch.randint(0, 9, (50,), dtype=I32), torch.randn(50, 2, 3)):
        same(ops.take(source, rows), PLAIN.take(source, rows))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 64), (17, 100), (70, 7)])
def test_rms_norm(ops, rows, width, dtype):
    x, gamma = sliced(rows, width, dtype=dtype), torch.randn(width).to(dtype)
    near(ops.rms_norm(x, gamma, 1e-6), PLAIN.rms_norm(x, gamma, 1e-6))


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("heads", "d", "r"), [(1, 64, 64), (3, 40, 12), (8, 64, 16)])
def test_rope(ops, heads, d, r, dtype, eps, gamma):
    x = torch.randn(9, heads * d + 5)[:, : heads * d].unflatten(1, (heads, d))
    turn = torch.rand(9, r).to(dtype)
    weight = torch.randn(d).to(dtype) if gamma else None
    near(ops.rope(x, turn, weight, eps, dtype), PLAIN.rope(x, turn, weight, eps, dtype))


# ---- matrix products --------------------------------------------------------------------------------------------------

SHAPES = [(1, 64, 48), (2, 100, 33), (3, 16, 1), (5, 7, 19), (8, 256, 130), (65, 72, 40), (300, 33, 17)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_linear(ops, rows, k, n, dtype):
    w = torch.randn(n, k).to(dtype)
    for x in (torch.randn(rows, k), sliced(rows, k), sliced(rows, k, dtype=BF16)):
        near(ops.linear(x, w), PLAIN.linear(x, w))
    near(ops.linear(x, w[n // 3 :]), PLAIN.linear(x, w[n // 3 :]))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_linear_int8_is_exact(ops, rows, k, n, groups):
    w = quantised(n, k * groups)
    w.values[0], w.values[-1] = 127, -128
    for x in (torch.randn(rows, k * groups) * 3, sliced(rows, k * groups), torch.ones(rows, k * groups) * 1e-7):
        same(ops.linear(x, w, groups), PLAIN.linear(x, w, groups))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_grouped_linear(ops, rows, k, n, dtype):
    w = torch.randn(3, n, k).to(dtype)
    for x in (torch.randn(rows, 3, k), sliced(rows, 3, k), torch.randn(rows, 3, k).to(BF16)):
        near(ops.grouped_linear(x, w), PLAIN.grouped_linear(x, w))


# ---- hyper-connections --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "m", "d"), [(1, 4, 64), (7, 4, 40), (33, 4, 16), (20, 2, 33), (5, 3, 8), (3, 1, 8)])
def test_hyper_connections(ops, rows, m, d, dtype):
    streams, fn = torch.randn(rows, m, d), torch.randn((2 + m) * m, m * d) * 0.2
    base, scale, gamma = torch.randn((2 + m) * m), torch.rand(3), torch.randn(d).to(dtype)
    args = (streams, fn, base, scale, gamma, 20, 1e-6, 1e-6)
    # The collapsed stream is rounded to bf16, where a last bit of float32 may flip a tie.
    loose = 1e-5 if dtype == F32 else 1e-2
    for got, want, tolerance in zip(ops.hc_pre(*args), PLAIN.hc_pre(*args), (loose, 1e-5, 1e-5), strict=True):
        near(got, want, tolerance)
    _, post, comb = PLAIN.hc_pre(*args)
    for y in (sliced(rows, d), torch.randn(rows, d).to(BF16)):
        near(ops.hc_post(streams, y, post, comb), PLAIN.hc_post(streams, y, post, comb))
    args = (streams, fn[:m].contiguous(), base[:m].contiguous(), scale[:1], gamma, 1e-6, 1e-6)
    for got, want in zip(ops.hc_head(*args), PLAIN.hc_head(*args), strict=True):
        near(got, want, loose)
    layers = [torch.randn(rows, m, d) for _ in range(3)]
    near(ops.taps(layers), PLAIN.taps(layers))


# ---- cache addressing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_len", [1, 4, 8, 128])
def test_addresses(ops, query_len):
    start = ints(0, 3, 120, 127, 500, 1000, 0)
    length = torch.randint(1, query_len + 1, (7,), dtype=I32)
    length[-1] = 0
    tables = [torch.randint(0, 99, (7, c), dtype=I32) for c in (10, 9, 5, 7)]
    args = (start, length, *tables, query_len, 128)
    same(ops.addresses(*args), PLAIN.addresses(*args))
    args = (ints(5, 6, 7, 8, 9, 10, 0), start, tables[1], 7, 128, 33)
    same(ops.draft_addresses(*args), PLAIN.draft_addresses(*args))


@pytest.mark.parametrize(
    ("to", "of"), [(F32, F32), (BF16, F32), (F32, BF16), (BF16, BF16), (torch.int8, torch.int8), (I32, I32)]
)
def test_scatter(ops, to, of):
    slots = ints(7, 2, 9)
    for shape in ((), (20,), (2, 5)):
        pool = (torch.randn(10, *shape) * 50).to(to)
        rows = (torch.randn(3, *shape) * 50).to(of)
        want = PLAIN.scatter(pool.clone(), slots, rows)
        got = ops.scatter(pool, slots, rows)
        assert got is pool
        same(got, want)
    with pytest.raises(TypeError, match="expected"):
        ops.scatter(torch.zeros(3, 2, dtype=torch.int8), slots, torch.zeros(3, 2))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_write_state(ops, dtype):
    pool, slots, positions = torch.randn(30, 24), ints(5, 9, 0, 29), ints(6, 7, -1, 8)
    rows, ape = sliced(4, 24, dtype=dtype), torch.randn(4, 12)
    want = PLAIN.write_state(pool.clone(), slots, rows, ape, positions)
    same(ops.write_state(pool, slots, rows, ape, positions), want)


def test_rows_outside_a_pool_are_never_touched(ops):
    pool = torch.zeros(4, 8)
    ops.scatter(pool, ints(-1, 4, 2**31 - 1, -(2**31)), torch.ones(4, 8))
    assert not pool.any()
    wild = ints(-5, 4, 10**9).view(1, 3)
    out = ops.attention(torch.randn(1, 2, 8), pool, wild, pool, wild, ints(3), torch.zeros(2), torch.ones(1, 4), 1.0)
    assert not out.any()
    ops.take(pool, wild.flatten())
    ops.embed(wild.flatten(), pool, 2)


# ---- compression and attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("m", "d", "overlap"), [(8, 32, True), (8, 20, True), (128, 48, False)])
def test_compress(ops, m, d, overlap, dtype):
    state = torch.randn(200, 2 * d * (2 if overlap else 1))
    rows = torch.randint(0, 200, (6, m), dtype=I32)
    rows[1, : m // 2] = -1
    rows[2] = -1
    args = (state, rows, torch.randn(d).to(dtype), torch.rand(6, 12).to(dtype), 1e-6, dtype)
    got, want = ops.compress(*args), PLAIN.compress(*args)
    live = ints(0, 1, 3, 4, 5)
    near(got[live], want[live], 1e-5)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("d", [4, 16, 64, 128])
def test_hadamard_quantise_is_exact(ops, d, dtype):
    x = torch.randn(5, 3 * d + 1)[:, : 3 * d].unflatten(1, (3, d)).to(dtype)
    same(ops.hadamard_quantise(x), PLAIN.hadamard_quantise(x))


def index_case(dtype: torch.dtype, d: int, rows: int, tokens: int, pages: int):
    q, keys = torch.randn(rows * tokens, 4, d), torch.randn((pages * rows + 1) * 32, d)
    history = torch.randperm(pages * rows, dtype=I32).view(rows, pages) + 1
    visible = torch.randint(0, pages * 32 + 1, (rows * tokens,), dtype=I32)
    weights = torch.randn(rows * tokens, 9)[:, 3:7]
    if dtype != torch.int8:
        return q.to(dtype), None, weights, keys.to(dtype), None, history, visible
    (q, q_scale), (keys, key_scale) = PLAIN.hadamard_quantise(q), PLAIN.hadamard_quantise(keys.unsqueeze(1))
    return q, q_scale, weights, keys.squeeze(1), key_scale.squeeze(1), history, visible


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8])
@pytest.mark.parametrize(
    ("d", "rows", "tokens", "pages", "k"), [(16, 2, 3, 5, 40), (32, 1, 1, 9, 64), (64, 3, 8, 2, 100)]
)
def test_index_topk(ops, dtype, d, rows, tokens, pages, k):
    case = index_case(dtype, d, rows, tokens, pages)
    got, want = (form.index_topk(*case, k, 0.1) for form in (ops, PLAIN))
    assert got.shape == want.shape and (got >= 0).sum(1).equal((want >= 0).sum(1))
    assert (got == want).float().mean() > 0.97  # near ties may fall either way in float32


def test_index_topk_breaks_ties_to_the_lowest_entry(ops):
    keys = torch.zeros(64, 16, dtype=torch.int8)
    args = (torch.ones(1, 2, 16, dtype=torch.int8), torch.ones(1, 2), torch.tensor([[1.0, -1.0]]), keys, torch.ones(64))
    got = ops.index_topk(*args, ints(1).view(1, 1), ints(30), 5, 1.0)
    same(got, ints(32, 33, 34, 35, 36).view(1, 5))
    keys[40], keys[50] = 1, 1  # one head for, one against: still all equal, as 0 and -0
    same(ops.index_topk(*args, ints(1).view(1, 1), ints(30), 5, 1.0), ints(32, 33, 34, 35, 36).view(1, 5))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "tokens", "heads", "d"), [(1, 1, 1, 16), (3, 4, 5, 40), (2, 8, 8, 64), (4, 2, 6, 80)])
def test_attention(ops, rows, tokens, heads, d, dtype):
    n = rows * tokens
    q = torch.randn(n, heads * d + 3)[:, : heads * d].unflatten(1, (heads, d)).to(dtype)
    kv, entries = torch.randn(90, d).to(dtype), torch.randn(70, d).to(dtype)
    kv_rows, entry_rows = torch.randint(-1, 90, (n, 33), dtype=I32), torch.randint(-1, 70, (rows, 21), dtype=I32)
    kv_rows[0] = -1
    count = torch.randint(0, 22, (n,), dtype=I32)
    sink, turn = torch.randn(heads), torch.rand(n, 12).to(dtype)
    for given in ((None, None, None), (entries, entry_rows, count), (entries, entry_rows, None)):
        args = (q, kv, kv_rows, *given, sink, turn, d**-0.5)
        near(ops.attention(*args), PLAIN.attention(*args))
    args = (q, kv, kv_rows[:rows], entries, entry_rows.repeat_interleave(tokens, 0), count, sink, turn, d**-0.5)
    near(ops.attention(*args), PLAIN.attention(*args))


# ---- mixture of experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "d", "experts", "k"), [(1, 32, 16, 2), (9, 40, 7, 3), (70, 64, 64, 6)])
def test_routers(ops, rows, d, experts, k):
    x, gate, bias = sliced(rows, d), torch.randn(experts, d) * 0.4, torch.randn(experts)
    positions = torch.arange(rows, dtype=I32)
    positions[rows // 2] = -1 if rows > 1 else 0
    live = positions >= 0
    got, want = (form.route(x, gate, bias, positions, k, 1.5) for form in (ops, PLAIN))
    same(got[0], want[0])
    near(got[1][live], want[1][live])
    table, ids = torch.randint(0, experts, (99, k), dtype=I32), torch.randint(0, 99, (rows,), dtype=I32)
    got, want = (form.route_hash(x, gate, table, ids, positions, 1.5) for form in (ops, PLAIN))
    same(got[0], want[0])
    near(got[1][live], want[1][live])


def test_router_ties_go_to_the_lowest_expert_and_extremes_stay_finite(ops):
    ids, weights = ops.route(torch.zeros(1, 16), torch.zeros(8, 16), torch.zeros(8), ints(0), 3, 1.0)
    same(ids, ints(0, 1, 2).view(1, 3))
    gate = torch.tensor([-200.0, -80.0, -20.0, 0.0, 1e-3, 20.0, 90.0, 1e30]).unsqueeze(1)
    got, weights = ops.route(torch.ones(1, 1), gate, torch.zeros(8), ints(0), 7, 1.0)
    same(got, ints(7, 6, 5, 4, 3, 2, 1).view(1, 7))
    want = torch.nn.functional.softplus(gate[got[0].long(), 0].double()).sqrt()
    near(weights.double()[0], want / want.sum())


def moe_case(rows: int, d: int, f: int, experts: int, k: int):
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(rows)]).to(I32)
    return sliced(rows, d), ids, torch.rand(rows, k)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int8])
@pytest.mark.parametrize(
    ("rows", "d", "f", "experts", "k"), [(1, 64, 32, 8, 2), (9, 40, 24, 5, 3), (140, 33, 50, 4, 2)]
)
def test_moe(ops, rows, d, f, experts, k, dtype):
    x, ids, weights = moe_case(rows, d, f, experts, k)
    if rows > 1:
        ids[0], ids[1, 0] = -1, -1
    if dtype == torch.int8:
        w13, w2 = quantised(experts + 1, 2 * f, d), quantised(experts + 1, d, f)
    else:
        w13, w2 = torch.randn(experts + 1, 2 * f, d).to(dtype), torch.randn(experts + 1, d, f).to(dtype)
    tolerance = {F32: 1e-5, BF16: 2e-3, torch.int8: 1e-2}[dtype]  # rounding inside may fall either way
    near(ops.moe(x, ids, weights, w13, w2, 2.0, 0), PLAIN.moe(x, ids, weights, w13, w2, 2.0, 0), tolerance)
    part = [QuantWeight(values=w.values[2:], scale=w.scale[2:]) if dtype == torch.int8 else w[2:] for w in (w13, w2)]
    near(ops.moe(x, ids, weights, *part, 2.0, 2), PLAIN.moe(x, ids, weights, *part, 2.0, 2), tolerance)


def test_moe_of_padding_alone_is_zero(ops):
    x, w13, w2 = torch.randn(3, 8), torch.randn(3, 8, 8), torch.randn(3, 8, 4)
    assert not ops.moe(x, torch.full((3, 2), -1, dtype=I32), torch.ones(3, 2), w13, w2, 1.0, 0).any()


# ---- tokens -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("vocab", [1, 5, 16, 100, 1000])
def test_argmax(ops, vocab, dtype):
    logits = sliced(20, vocab, dtype=dtype)
    logits[3] = 1.0
    logits[4] = -torch.inf
    logits[5, vocab // 2 :] = 9.0
    same(ops.argmax(logits), PLAIN.argmax(logits))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "steps", "vocab", "rank"), [(1, 7, 600, 16), (3, 4, 1030, 20), (5, 2, 33, 8)])
def test_markov(ops, rows, steps, vocab, rank, dtype):
    base = torch.randn(rows * steps, vocab).unflatten(0, (rows, steps))
    w1, w2 = torch.randn(vocab, rank).to(dtype), torch.randn(vocab, rank).to(dtype)
    anchor = torch.randint(0, vocab, (rows,), dtype=I32)
    same(ops.markov(base, w1, w2, anchor), PLAIN.markov(base, w1, w2, anchor))


@pytest.mark.parametrize("query_len", [1, 8])
def test_slots(ops, query_len):
    slots, anchor = ints(4, 0, 2, 5, 5), torch.randint(0, 9, (6,), dtype=I32)
    drafts, position = torch.randint(0, 3, (6, 7), dtype=I32), torch.randint(0, 50, (6,), dtype=I32)
    limit = position + torch.randint(0, 12, (6,), dtype=I32)
    args = (slots, anchor, drafts, position, limit, query_len)
    same(ops.begin(*args), PLAIN.begin(*args))
    for _ in range(50):
        ids, greedy = (torch.randint(0, 2, (5, query_len), dtype=I32) for _ in range(2))
        length, eos = torch.randint(0, query_len + 1, (5,), dtype=I32), torch.randint(-1, 3, (5,), dtype=I32)
        args = (ids, greedy, length, eos)
        tokens, count, ended, _ = want = PLAIN.accept(*args)
        same(ops.accept(*args), want)
        count[3:] = ended[3:] = 0
        states = [[t.clone() for t in (anchor, position, limit)] for _ in range(2)]
        for form, state in zip((ops, PLAIN), states, strict=True):
            form.commit(slots, tokens, count, ended, *state)
        same(*states)
