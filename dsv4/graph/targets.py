"""Where a traced step can be lowered to. `register` adds a target; the module that implements one is imported on first use."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsv4.errors import CaptureError

if TYPE_CHECKING:
    from dsv4.graph.stages import Lowered

Lower = Callable[..., "Lowered"]
_TARGETS: dict[str, Lower | str] = {
    "plain": "dsv4.graph.flat:PlainLowered",
    "inductor": "dsv4.graph.flat:InductorLowered",
    "cpu": "dsv4.graph.cpu:CpuLowered",
    "torchair": "dsv4.graph.npu:GeLowered",
    "npugraph_ex": "dsv4.graph.npu_run:NpuGraphLowered",
}


def register(name: str, lower: Lower | str) -> None:
    """Adds or replaces a target: a function (Traced, **options) -> Lowered, or where one is, as "module:name"."""
    _TARGETS[name] = lower


def targets() -> tuple[str, ...]:
    """Names of the registered targets."""
    return tuple(sorted(_TARGETS))


def find(name: str) -> Lower:
    """The lowering function of a target. Raises CaptureError for an unknown name."""
    if name not in _TARGETS:
        raise CaptureError(f"no target {name!r}; there are {', '.join(targets())}")
    lower = _TARGETS[name]
    if isinstance(lower, str):
        module, _, attribute = lower.partition(":")
        lower = getattr(importlib.import_module(module), attribute)
    return lower
