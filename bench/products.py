"""The matrix products of a captured step by themselves: as bare `F.linear`, and as calls of our own kernels.

Shapes and weights are those of the step's tape; inputs are random, routing is uniform. Projections, expert segments,
hyper-connection mixes, router gates and heads all count.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.config import StepShape
from dsv4.graph.nodes import op_name
from dsv4.graph.tape import ARENA, FIRST_INPUT, Entry
from dsv4.ops.cpu import KERNELS, library
from dsv4.ops.cpu_call import encode
from dsv4.ops.cpu_params import Panels, unpack
from dsv4.tree import named_leaves
from serving.worker import Worker

Run = Callable[[], object]
Call = tuple[torch._ops.OpOverload, tuple]
OPS = torch.ops.dsv4


def _operands(worker: Worker, shape: StepShape) -> Iterator[tuple[str, list[Tensor]]]:
    """Each call of the step's tape: its name and the tensors it reads, those in the arena replaced by random ones."""
    lowered = worker.programs[shape].lowered
    trees = {"params": worker.params, "cache": worker.cache, "state": worker.state}
    leaves = {f"{name}.{path}": leaf for name, tree in trees.items() for path, leaf in named_leaves(tree)}
    bases = {FIRST_INPUT + i: leaves.get(leaf.path) for i, leaf in enumerate(lowered.args_info)}

    def tensors(entry: Entry) -> list[Tensor]:
        return [
            torch.randn(place.shape) if place.home == ARENA else place.tensor(bases[place.home])
            for place in entry.reads
        ]  # fmt: skip

    for entry in lowered.tape.entries:
        name = op_name(entry.node).removeprefix("dsv4.")
        if name in _PRODUCTS:
            yield name, tensors(entry)


def _routes(tokens: int, top: int, experts: int) -> Tensor:
    return torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)]).to(torch.int32)


def _plain(w: Tensor, dims: int, scale: Tensor | None = None) -> Tensor:
    """A matrix, or a stack of them, in plain rows of float32."""
    if w.dim() != dims:
        rows = unpack(Panels(values=w, scale=scale))
        w = rows if scale is None else rows.values
    return w.float() if scale is None else w.float() * scale.unsqueeze(-1)


def _linear(x: Tensor, w: Tensor, *_: Tensor) -> tuple[list[Run], list[Call]]:
    wide = _plain(w, 2)
    return [lambda: F.linear(x, wide)], [(OPS.linear.default, (x, w))]


def _int8(x: Tensor, values: Tensor, scale: Tensor) -> tuple[list[Run], list[Call]]:
    w = _plain(values, 2, scale)
    return [lambda: F.linear(x, w)], [(OPS.linear_int8.default, (x, values, scale, 1))]


def _grouped(x: Tensor, w: Tensor) -> tuple[list[Run], list[Call]]:
    parts = [(x[:, g], m) for g, m in enumerate(_plain(w, 3))]
    return [lambda: [F.linear(a, m) for a, m in parts]], [(OPS.grouped_linear.default, (x, w))]


def _moe(x: Tensor, ids: Tensor, weights: Tensor, *experts: Tensor) -> tuple[list[Run], list[Call]]:
    w13, w2 = (experts[0], experts[2]) if len(experts) == 4 else experts
    scales = (experts[1], experts[3]) if len(experts) == 4 else (None, None)
    count = len(w13)
    ids, weights = _routes(*ids.shape, count - 1), torch.rand(ids.shape)
    wide = [_plain(w, 3, s) for w, s in zip((w13, w2), scales, strict=True)]
    tokens = [(ids == e).any(1).nonzero().squeeze(1) for e in range(count - 1)] + [torch.arange(len(x))]
    parts = [
        (wide[0][e], wide[1][e], x[t], torch.randn(len(t), wide[1].shape[2])) for e, t in enumerate(tokens) if len(t)
    ]
    op = OPS.moe_int8.default if len(experts) == 4 else OPS.moe.default
    return (
        [lambda: [(F.linear(a, up), F.linear(h, down)) for up, down, a, h in parts]],
        [(op, (x, ids, weights, *experts, 10.0, 0))],
    )  # fmt: skip


def _mix(streams: Tensor, fn: Tensor, *_: Tensor) -> tuple[list[Run], list[Call]]:
    return _linear(streams.flatten(1), fn)


_PRODUCTS = {
    "linear": _linear, "linear_int8": _int8, "grouped_linear": _grouped, "moe": _moe, "moe_int8": _moe,
    "hc_pre": _mix, "hc_head": _mix, "route": _linear, "route_hash": _linear,
}  # fmt: skip


def step_products(worker: Worker, shape: StepShape, threads: int) -> tuple[Run, Run]:
    """(all products as F.linear in float32, the same as kernel calls in one list) of one program."""
    bare: list[Run] = []
    calls: list[Call] = []
    for name, operands in _operands(worker, shape):
        runs, kernels = _PRODUCTS[name](*operands)
        bare += runs
        calls += kernels
    held = [(op, args, KERNELS[op].allocate(args)) for op, args in calls]
    packed = b"".join(
        encode(KERNELS[op].fn_address, KERNELS[op].pack(args, outs)) for op, args, outs in held
    )  # fmt: skip
    run = library().dsv4_run
    return lambda: [each() for each in bare], lambda keep=held: run(packed, len(held), threads)


def live_rows(worker: Worker, slots: Sequence[int], position: int, limit: int) -> None:
    """Seats `slots` at `position` on pages of their own, so that a decode program has real rows to run."""
    state = worker.state
    for group in ("history", "window", "tail", "open"):
        table = getattr(state.tables, group)
        for row, slot in enumerate(slots):
            table[slot] = torch.arange(row * table.shape[1], (row + 1) * table.shape[1], dtype=torch.int32) + 1
    for field, value in (("position", position), ("limit", limit), ("eos", -1)):
        getattr(state, field)[list(slots)] = value
