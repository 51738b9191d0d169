"""Records what a step function does as an FX graph, by running it once on meta tensors.

A `TorchDispatchMode` sees every operator below autograd; each call becomes one node. Meta tensors carry shapes, strides and
storages and cost a quarter of FakeTensors per operator (and no second of imports), which matters because every program is
captured at start-up. Nodes hold the result in `meta["val"]` and where they came from in `meta["frames"]`.
"""

import functools
import operator
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import einops
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

import dsv4.ops
from dsv4.errors import CaptureError
from dsv4.graph.nodes import mutates, tensors_in

_FOREIGN = (
    *(os.path.dirname(module.__file__) + os.sep for module in (torch, einops)),
    os.path.dirname(__file__) + os.sep,
)
_ROOT = os.path.dirname(os.path.dirname(dsv4.ops.__file__)).removesuffix("dsv4")  # what holds the packages
_OPS = os.path.dirname(dsv4.ops.__file__) + os.sep
_META = torch.device("meta")
_READS = ("unallocated storage", "tensor to numpy")  # what torch says where it reads without calling an operator


class Frame(NamedTuple):
    """A line of the program that is being captured."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        path = self.code.co_filename.removeprefix(_ROOT)
        path = path if path != self.code.co_filename else os.path.basename(path)
        return f"{path}:{self.line} in {self.code.co_name}"


def source(node: Node) -> str:
    """The model's line that made a node: the innermost one outside the definitions of operators."""
    return _source(node.meta.get("frames", ()))


def _source(frames: Sequence[Frame]) -> str:
    outside = (frame for frame in frames if not frame.code.co_filename.startswith(_OPS))
    return str(next(outside, frames[0] if frames else "unknown line"))


def _frames(stop: CodeType) -> tuple[Frame, ...]:
    """The calling lines outside torch, innermost first, up to the caller of the step function."""
    frame, found = sys._getframe(2), []
    while frame is not None and frame.f_code is not stop:
        if not frame.f_code.co_filename.startswith(_FOREIGN):
            found.append(Frame(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _failure(label: str, func: Any, error: Exception, frames: Sequence[Frame]) -> Exception | None:
    """What to raise when an operator did not run on meta tensors; None for an ordinary mistake of the caller."""
    if torch.Tag.data_dependent_output in func.tags:
        what = "reads a tensor's value on the host (.item(), int(), bool(), a branch); keep it a tensor"
    elif torch.Tag.dynamic_output_shape in func.tags:
        what = "has a shape that depends on data; use a mask or a fixed number of rows"
    elif isinstance(error, NotImplementedError):
        what = "has no shape function; register one with torch.library.register_fake"
    else:
        return None
    return _capture_error(f"{label}: {func} {what}", frames)


def _capture_error(what: str, frames: Sequence[Frame]) -> CaptureError:
    """One line that names the model's line; the lines that led there are a note."""
    error = CaptureError(f"{what} ({_source(frames)})")
    error.add_note("\n".join(["reached through, innermost first:", *(f"  {frame}" for frame in frames)]))
    return error


class _Recorder(TorchDispatchMode):
    """Appends one node per operator call; `stop` is where the walk up the Python stack ends."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that this hook asks for imports torch._dynamo, a second of start-up that nothing here needs.
        return False

    def __init__(self, label: str, device: torch.device, stop: CodeType) -> None:
        super().__init__()
        self.label, self.device, self.stop = label, device, stop
        self.graph = Graph()
        self.nodes: dict[int, Node] = {}
        self.constants: dict[str, Tensor] = {}
        self.twins: dict[int, Tensor] = {}
        self.alive: list[Any] = []  # ids name tensors only while the tensors live

    def name(self, value: Any, node: Node) -> None:
        if isinstance(value, Tensor):
            self.nodes[id(value)] = node
            self.alive.append(value)

    def _meta(self, value: Any) -> Any:
        """Real tensors met on the way (`torch.tensor(...)`, closures) become constants of the graph, by their meta twin."""
        if not isinstance(value, Tensor) or id(value) in self.nodes:
            return value
        if value.device == _META:
            raise CaptureError(f"{self.label}: a meta tensor that is no argument of the step; pass it as one")
        if id(value) not in self.twins:
            target = f"constant_{len(self.constants)}"
            twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
            self.constants[target] = value
            node = self.graph.get_attr(target)
            node.meta["val"] = twin
            self.name(twin, node)
            self.twins[id(value)] = twin
            self.alive.append(value)
        return self.twins[id(value)]

    def _node(self, value: Any) -> Any:
        return self.nodes[id(value)] if isinstance(value, Tensor) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(kind is not Tensor for kind in types):
            return NotImplemented  # a wrapper, as of a collective in flight, unwraps itself first
        if torch.Tag.nondeterministic_seeded in func.tags:
            what = f"{self.label}: {func} draws random numbers; pass noise as an argument"
            raise _capture_error(what, _frames(self.stop))
        args = map_aggregate(args, self._meta)
        kwargs = dict(map_aggregate(kwargs or {}, self._meta))
        # A step lives on one device: whatever it makes is made there, and on meta while it is recorded.
        places = kwargs.get("device") is not None or (_takes_device(func) and not tensors_in((args, kwargs)))
        given = kwargs | {"device": self.device} if places else kwargs
        kwargs = kwargs | {"device": _META} if places else kwargs
        try:
            value = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            frames = _frames(self.stop)
            failure = _failure(self.label, func, error, frames)
            if failure is not None:
                raise failure from error
            error.add_note(f"while capturing {self.label}: {func} at {_source(frames)}")
            raise
        if not isinstance(value, (Tensor, tuple, list)) and not func._schema.is_mutable:
            return value  # a question about metadata, already answered
        node = self.graph.call_function(func, map_aggregate(args, self._node), map_aggregate(given, self._node))
        node.meta |= {"val": value, "frames": _frames(self.stop)}
        if isinstance(value, (tuple, list)):
            for i, part in enumerate(value):
                item = self.graph.call_function(operator.getitem, (node, i))
                item.meta |= {"val": part, "frames": node.meta["frames"]}
                self.name(part, item)
        else:
            self.name(value, node)
        return value


def record(
    label: str, fn: Callable[..., Any], inputs: Sequence[Tensor], names: Sequence[str], device: torch.device
) -> tuple[Graph, dict[str, Tensor], list[Any]]:
    """Runs `fn(*inputs)` on meta tensors, for a step that lives on `device`.

    Returns the graph, with placeholders called `names` and a tuple of tensors as output, its constants by `get_attr` target,
    and the list of leaves that `fn` returned. Raises CaptureError, naming operator and line, for a data-dependent shape, a
    read of a value, a random draw, or an operator without a shape function.
    """
    recorder = _Recorder(label, device, record.__code__)
    for name, value in zip(names, inputs, strict=True):
        node = recorder.graph.placeholder(name)
        node.meta["val"] = value
        recorder.name(value, node)
    try:
        with torch.no_grad(), recorder:
            results = fn(*inputs)
    except (RuntimeError, TypeError) as error:
        if any(words in str(error) for words in _READS):
            what = f"{label}: a tensor's value is read on the host (.tolist(), .numpy()); keep it a tensor"
            raise _capture_error(what, _raised_at(error)) from error
        raise
    results = [recorder._meta(value) for value in results]
    tensors = tensors_in(results)
    output = recorder.graph.output(tuple(recorder.nodes[id(value)] for value in tensors))
    output.meta["val"] = tensors
    _drop_unused(recorder.graph)
    return recorder.graph, recorder.constants, results


def _raised_at(error: BaseException) -> tuple[Frame, ...]:
    """The lines outside torch that an error went through, innermost first."""
    lines = [Frame(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    return tuple(line for line in reversed(lines) if not line.code.co_filename.startswith(_FOREIGN))


@functools.cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _drop_unused(graph: Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not mutates(node):
            graph.erase_node(node)
