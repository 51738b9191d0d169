"""Each fused CPU kernel against plain PyTorch (and bare `F.linear` for products), interleaved in one run.

    python -m bench.kernels [--only NAME] [--threads N] [--rows 1 8 64 512]

"us" is the call from Python; "tape us" the same kernel as a packed call, as a captured step runs it. Times are the least of
many runs; the columns that matter are the ratios of the eager call (above 1: the kernel is faster).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F

from dsv4.ops.cpu import KERNELS, cpu_ops, library
from dsv4.ops.cpu_call import encode
from dsv4.ops.cpu_params import Panels
from dsv4.ops.table import PLAIN
from dsv4.tree import QuantWeight

D, HEADS, HEAD_DIM, ROPE, INTER, EXPERTS, TOPK, STREAMS, WINDOW, VOCAB = 256, 8, 64, 32, 256, 16, 2, 4, 128, 4096
I32, BF16 = torch.int32, torch.bfloat16
Case = tuple[str, str, tuple, Callable[[], object] | None]


def quantised(*shape: int) -> QuantWeight:
    values = torch.randint(-127, 128, shape, dtype=torch.int8)
    return QuantWeight(values=values, scale=torch.rand(shape[:-1]) * 0.01)


def products(rows: int) -> Iterator[Case]:
    for n, k in ((1024, D), (4096, 1024)):
        x, w = torch.randn(rows, k), torch.randn(n, k)
        bare = lambda x=x, w=w: F.linear(x, w)  # noqa: E731
        yield f"linear f32 {k}->{n}", "linear", (x, w), bare
        yield f"linear bf16 {k}->{n}", "linear", (x, w.to(BF16)), bare
        yield f"linear int8 {k}->{n}", "linear", (x, quantised(n, k)), bare
    w = torch.randn(4, 64, 128)
    yield "grouped_linear f32", "grouped_linear", (torch.randn(rows, 4, 128), w), None


def experts(rows: int) -> Iterator[Case]:
    x, weights = torch.randn(rows, D), torch.rand(rows, TOPK)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(rows)]).to(I32)
    w13, w2 = torch.randn(EXPERTS + 1, 2 * INTER, D), torch.randn(EXPERTS + 1, D, INTER)
    routes = [(e, (ids == e).any(1).nonzero().squeeze(1)) for e in range(EXPERTS)] + [(EXPERTS, torch.arange(rows))]
    parts = [(w13[e], w2[e], x[t], torch.randn(len(t), INTER)) for e, t in routes if len(t)]

    def bare() -> None:
        for up, down, x, h in parts:
            F.linear(x, up)
            F.linear(h, down)

    yield "moe f32", "moe", (x, ids, weights, w13, w2, 10.0, 0), bare
    yield "moe bf16", "moe", (x, ids, weights, w13.to(BF16), w2.to(BF16), 10.0, 0), bare
    int8 = quantised(EXPERTS + 1, 2 * INTER, D), quantised(EXPERTS + 1, D, INTER)
    yield "moe int8", "moe", (x, ids, weights, *int8, 10.0, 0), bare
    gate, positions = torch.randn(EXPERTS, D), torch.arange(rows, dtype=I32)
    yield "route", "route", (x, gate, torch.randn(EXPERTS), positions, TOPK, 1.5), None


def hyper(rows: int) -> Iterator[Case]:
    streams, fn = torch.randn(rows, STREAMS, D), torch.randn(24, STREAMS * D) * 0.1
    args = (streams, fn, torch.randn(24), torch.rand(3), torch.randn(D), 20, 1e-6, 1e-6)
    _, post, comb = PLAIN.hc_pre(*args)
    yield "hc_pre", "hc_pre", args, None
    yield "hc_post", "hc_post", (streams, torch.randn(rows, D), post, comb), None
    x, turn = torch.randn(rows, HEADS, HEAD_DIM), torch.randn(rows, ROPE)
    yield "rope", "rope", (x, turn, None, 1e-6, torch.float32), None
    yield "rms_norm", "rms_norm", (torch.randn(rows, D), torch.randn(D), 1e-6), None


def attentions(rows: int) -> Iterator[Case]:
    turn, sink = torch.randn(rows, ROPE), torch.randn(HEADS)
    kv_rows = (torch.arange(rows).unsqueeze(1) + torch.arange(WINDOW)).to(I32)
    entry_rows = torch.randint(0, 512, (rows, 64), dtype=I32)
    count = torch.full((rows,), 64, dtype=I32)
    for dtype in (torch.float32, BF16):
        q, kv, entries = (
            torch.randn(*s).to(dtype) for s in ((rows, HEADS, HEAD_DIM), (2048, HEAD_DIM), (512, HEAD_DIM))
        )
        name = "f32" if dtype == torch.float32 else "bf16"
        yield (
            f"attention {name} 128+64",
            "attention",
            (q, kv, kv_rows, entries, entry_rows, count, sink, turn, 0.1),
            None,
        )
    history, visible = torch.arange(16, dtype=I32).view(1, 16), torch.full((rows,), 512, dtype=I32)
    q, keys = PLAIN.hadamard_quantise(torch.randn(rows, 16, 64)), PLAIN.hadamard_quantise(torch.randn(512, 1, 64))
    weights = torch.randn(rows, 16)
    args = (q[0], q[1], weights, keys[0].squeeze(1), keys[1].squeeze(1), history, visible, 64, 0.1)
    yield "index_topk int8 64/512", "index_topk", args, None
    args = (torch.randn(rows, 16, 64), None, weights, torch.randn(512, 64), None, history, visible, 64, 0.1)
    yield "index_topk f32 64/512", "index_topk", args, None
    yield "hadamard_quantise", "hadamard_quantise", (torch.randn(rows, 16, 64),), None
    state = torch.randn(400, 4 * HEAD_DIM)
    chosen = torch.randint(0, 400, (-(-rows // 4), 8), dtype=I32)
    yield "compress csa", "compress", (state, chosen, torch.randn(HEAD_DIM), turn[: len(chosen)], 1e-6, BF16), None


def tokens(rows: int) -> Iterator[Case]:
    yield "argmax", "argmax", (torch.randn(rows, VOCAB),), None
    w1, w2, anchor = torch.randn(VOCAB, 64), torch.randn(VOCAB, 64), torch.zeros(rows, dtype=I32)
    if rows <= 64:
        yield "markov k=7", "markov", (torch.randn(rows, 7, VOCAB), w1, w2, anchor), None
    start, length = torch.full((rows,), 1000, dtype=I32), torch.ones(rows, dtype=I32)
    tables = [torch.ones(rows, c, dtype=I32) for c in (16, 9, 5, 9)]
    yield "addresses", "addresses", (start, length, *tables, 1, WINDOW), None


def packed(op: str, args: tuple) -> Callable[[], object]:
    """The kernel call that `op` makes, packed once; what it writes is kept."""
    form = {QuantWeight: lambda w: (w.values, w.scale), Panels: lambda w: (w.values,)}
    flat = tuple(x for arg in args for x in form.get(type(arg), lambda v: (v,))(arg))
    int8 = any(isinstance(arg, QuantWeight) for arg in args)
    kernel = KERNELS[getattr(torch.ops.dsv4, f"{op}_int8" if int8 else op).default]
    flat += (1,) if int8 and op == "linear" else ()
    outs = kernel.allocate(flat)
    call, threads = encode(kernel.fn_address, kernel.pack(flat, outs)), torch.get_num_threads()
    run = library().dsv4_run
    return lambda keep=(flat, outs): run(call, 1, threads)


def least(fns: list[Callable[[], object]], seconds: float) -> list[float]:
    """Least time of each function, taken in turns so that all see the same machine."""
    best, end = [float("inf")] * len(fns), time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end or rounds < 3:
        rounds += 1
        for i, fn in enumerate(fns):
            for _ in range(3):
                began = time.perf_counter()
                fn()
                best[i] = min(best[i], time.perf_counter() - began)
    return best


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--seconds", type=float, default=0.3, help="per case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ops = cpu_ops()
    print(f"{'operator':28}{'rows':>6}{'tape us':>10}{'us':>10}{'x plain':>10}{'x F.linear':>12}")
    for rows in options.rows:
        for group in (products, experts, hyper, attentions, tokens):
            for name, op, args, bare in group(rows):
                if options.only not in name:
                    continue
                forms = [partial(getattr(form, op), *args) for form in (ops, PLAIN)]
                tape, own, plain, *rest = least([packed(op, args), *forms, *[bare] * bool(bare)], options.seconds)
                ratio = f"{rest[0] / own:12.2f}" if rest else ""
                print(f"{name:28}{rows:6}{tape * 1e6:10.1f}{own * 1e6:10.1f}{plain / own:10.2f}{ratio}", flush=True)


if __name__ == "__main__":
    main()
