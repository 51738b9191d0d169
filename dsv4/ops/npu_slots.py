"""Slots of the NPU op table that an installed package of custom operators can fill.

A package names its operators in the entry point group `dsv4.npu_ops`: the entry's name is the slot, its object a function
with the signature of the operator's `plain` twin, usually a call of a `torch.library` operator that the package registers
with a shape function and, for graph-engine mode, a torchair converter (`torchair.ge.custom_op`).

    [project.entry-points."dsv4.npu_ops"]
    hc_pre = "my_ops.hyper:hc_pre"
"""

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dsv4.errors import ConfigError

GROUP = "dsv4.npu_ops"
SLOTS = ("attention", "compress", "index_topk", "hadamard_quantise", "route", "route_hash", "hc_pre", "hc_post")

Plugins = Mapping[str, Callable[..., Any]]


def installed(found: tuple[EntryPoint, ...] | None = None) -> Plugins:
    """The operators that installed packages offer, by slot. Raises ConfigError for an unknown slot, or one offered twice."""
    plugins: dict[str, Callable[..., Any]] = {}
    for entry in entry_points(group=GROUP) if found is None else found:
        if entry.name not in SLOTS:
            raise ConfigError(f"{entry.value}: no NPU slot is called {entry.name!r}; the slots are {', '.join(SLOTS)}")
        if entry.name in plugins:
            raise ConfigError(f"{entry.value}: slot {entry.name!r} is filled by another package too; uninstall one")
        plugins[entry.name] = entry.load()
    return plugins
