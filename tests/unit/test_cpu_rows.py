"""A row's bits depend on the row alone: not on how many rows there are, which neighbours, threads, or vector width."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.errors import PlatformError
from dsv4.ops import cpu_build
from dsv4.ops.cpu import CPU, cpu_ops
from dsv4.ops.cpu_params import pack
from dsv4.tree import QuantWeight

ROWS = 300
I32, BF16 = torch.int32, torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def kernels():
    try:
        cpu_ops()
    except PlatformError as error:
        pytest.skip(str(error))


def quantised(*shape: int) -> QuantWeight:
    return QuantWeight(values=torch.randint(-127, 128, shape, dtype=torch.int8), scale=torch.rand(shape[:-1]) * 0.01)


def cases() -> Iterator[tuple[str, Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """Operators as functions of tensors that all lead with ROWS, and such tensors."""
    torch.manual_seed(0)
    x, d, heads, k, experts = torch.randn(ROWS, 72), 72, 3, 2, 5
    for name, w in (("f32", torch.randn(37, d)), ("bf16", torch.randn(37, d).to(BF16)), ("int8", quantised(37, d))):
        yield f"linear-{name}", lambda x, w=w: CPU.linear(x, w), (x,)
    broad = torch.randn(ROWS, 64)
    for name, make in (("f32", torch.randn), ("bf16", lambda *s: torch.randn(*s).to(BF16)), ("int8", quantised)):
        w = pack(make(48, 64))
        yield f"panels-{name}", lambda x, w=w: CPU.linear(x, w), (broad,)
    per_group, weight = quantised(21, d), torch.randn(d)
    yield "linear-groups", lambda x: CPU.linear(x, per_group, 3), (x,)
    grouped = torch.randn(3, 19, 24).to(BF16)
    yield "grouped_linear", lambda x: CPU.grouped_linear(x, grouped), (x.unflatten(1, (3, 24)),)
    fn, base, scale, gamma = torch.randn(24, 4 * 18), torch.randn(24), torch.rand(3), torch.randn(18)
    streams = x.unflatten(1, (4, 18)).contiguous()
    yield "hc_pre", lambda s: CPU.hc_pre(s, fn, base, scale, gamma, 20, 1e-6, 1e-6), (streams,)
    yield (
        "hc_head",
        lambda s: CPU.hc_head(s, fn[:4].contiguous(), base[:4].contiguous(), scale[:1], gamma, 1e-6, 1e-6),
        (streams,),
    )
    yield "rms_norm", lambda x: CPU.rms_norm(x, weight, 1e-6), (x,)
    turn = torch.rand(ROWS, 8)
    yield "rope", lambda x, t: CPU.rope(x, t, None, 1e-6, BF16), (x.unflatten(1, (heads, 24)), turn)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(ROWS)]).to(I32)
    shapes = (experts + 1, 2 * 20, d), (experts + 1, d, 20)
    for name, make in (("f32", torch.randn), ("bf16", lambda *s: torch.randn(*s).to(BF16)), ("int8", quantised)):
        w13, w2 = make(*shapes[0]), make(*shapes[1])
        yield (
            f"moe-{name}",
            lambda x, i, w, w13=w13, w2=w2: CPU.moe(x, i, w, w13, w2, 5.0, 0),
            (x, ids, torch.rand(ROWS, k)),
        )
        w13, w2 = pack(make(experts + 1, 96, 64)), pack(make(experts + 1, 64, 48))
        yield (
            f"moe-panels-{name}",
            lambda x, i, w, w13=w13, w2=w2: CPU.moe(x, i, w, w13, w2, 5.0, 0),
            (broad, ids, torch.rand(ROWS, k)),
        )
    gate, bias = torch.randn(20, d), torch.randn(20)
    yield "route", lambda x, p: CPU.route(x, gate, bias, p, 3, 1.5), (x, torch.arange(ROWS, dtype=I32))
    kv, entries, sink = torch.randn(90, 24), torch.randn(70, 24), torch.randn(heads)
    rows, picks = torch.randint(-1, 90, (ROWS, 33), dtype=I32), torch.randint(-1, 70, (ROWS, 17), dtype=I32)
    count = torch.randint(0, 18, (ROWS,), dtype=I32)
    for dtype in (torch.float32, BF16):
        pools = kv.to(dtype), entries.to(dtype)
        yield f"attention-{dtype}", lambda q, r, e, c, t, pools=pools: CPU.attention(
            q, pools[0], r, pools[1], e, c, sink, t, 0.2
        ), (x.unflatten(1, (heads, 24)).to(dtype), rows, picks, count, turn)  # fmt: skip
    keys, key_scale = CPU.hadamard_quantise(torch.randn(160, 1, 32))
    q, q_scale = CPU.hadamard_quantise(torch.randn(ROWS, 4, 32))
    history, visible = torch.arange(5, dtype=I32).repeat(ROWS, 1), torch.randint(0, 161, (ROWS,), dtype=I32)
    yield "index_topk", lambda q, s, w, h, v: CPU.index_topk(
        q, s, w, keys.squeeze(1), key_scale.squeeze(1), h, v, 30, 0.1
    ), (q, q_scale, torch.randn(ROWS, 4), history, visible)  # fmt: skip
    yield "hadamard", CPU.hadamard_quantise, (torch.randn(ROWS, 4, 32),)
    yield "compress", lambda r, t: CPU.compress(torch.ones(99, 96).cumsum(0).sin(), r, torch.ones(24), t, 1e-6, BF16), (
        torch.randint(-1, 99, (ROWS, 8), dtype=I32), turn)  # fmt: skip
    yield "argmax", CPU.argmax, (x,)
    for name, dtype, vocab, rank in (("f32", torch.float32, 600, 12), ("bf16", BF16, 608, 32)):
        w1, w2 = torch.randn(vocab, rank).to(dtype), pack(torch.randn(vocab, rank).to(dtype))
        yield (
            f"markov-{name}",
            lambda b, a, w1=w1, w2=w2: CPU.markov(b, w1, w2, a),
            (torch.randn(ROWS, 3, vocab), torch.randint(0, vocab, (ROWS,), dtype=I32)),
        )


def flat(out: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


@pytest.mark.parametrize(
    ("name", "op", "inputs"), list(cases()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_rows_are_independent(name, op, inputs):
    torch.set_num_threads(2)
    whole = flat(op(*inputs))
    for first, count in (
        (0, 1),
        (7, 1),
        (1, 2),
        (3, 3),
        (11, 4),
        (2, 5),
        (40, 8),
        (9, 17),
        (100, 64),
        (30, 129),
        (1, 299),
    ):
        some = flat(op(*(x[first : first + count].contiguous() for x in inputs)))
        for part, all_rows in zip(some, whole, strict=True):
            assert torch.equal(part, all_rows[first : first + count]), (name, first, count)
    order = torch.randperm(ROWS)
    for part, all_rows in zip(flat(op(*(x[order] for x in inputs))), whole, strict=True):
        assert torch.equal(part, all_rows[order]), name


@pytest.mark.parametrize("count", [1, 8, ROWS])
def test_threads_change_nothing(count):
    before = torch.get_num_threads()
    try:
        for name, op, inputs in cases():
            found = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found.append(flat(op(*(x[:count] for x in inputs))))
            for other in found[1:]:
                assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), name
    finally:
        torch.set_num_threads(before)


def test_every_row_count_of_a_product(kernels):
    torch.manual_seed(0)
    x, w, q = torch.randn(ROWS, 50), torch.randn(19, 50), quantised(19, 50)
    for weight in (w, w.to(BF16), q):
        whole = CPU.linear(x, weight)
        for count in range(1, ROWS + 1):
            assert torch.equal(CPU.linear(x[:count], weight), whole[:count])


DIGEST = """
import hashlib, sys
sys.path[:0] = sys.argv[1:2]
from dsv4.ops import cpu_build
cpu_build.library = lambda made=cpu_build.load(cpu_build.build(tuple(sys.argv[2:]))): made
from tests.unit.test_cpu_rows import cases, flat
for name, op, inputs in cases():
    digest = hashlib.sha256()
    for out in flat(op(*inputs)):
        digest.update(out.contiguous().view(-1).view(dtype=__import__("torch").uint8).numpy().tobytes())
    print(name, digest.hexdigest())
"""


def digests(*flags: str, **environment: str) -> str:
    """A line for each case, from a process of its own: kernels built with `flags`."""
    root = str(Path(cpu_build.__file__).parents[2])
    command = [sys.executable, "-c", DIGEST, root, *flags]
    environment = os.environ | environment
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, env=environment).stdout


def has(feature: str) -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and feature in cpuinfo.read_text().split()


def test_the_matrix_unit_changes_nothing():
    if not has("amx_bf16"):
        pytest.skip("needs a machine with AMX to compare with")
    native = digests()
    assert len(native.splitlines()) > 10
    assert digests(DSV4_NO_AMX="1") == native


@pytest.mark.slow
def test_vector_width_changes_nothing():
    """The AVX2 build and the portable one give the bits of the AVX-512 build."""
    if not has("avx512bw"):
        pytest.skip("needs a machine with AVX-512 to compare with")
    native = digests()
    assert digests("-mno-avx512f") == native
    assert digests("-mno-avx512vnni") == native
    assert digests("-mno-avx") == native
