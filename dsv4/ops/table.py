"""The op table: the named operators the model is written in, and nothing else.

A step function closes over one `OpSet`. `plain` is the definition (its docstrings are the contract); `cpu` runs fused,
row-independent kernels; `npu` uses torch_npu operators. All forms of an operator take the same arguments and agree.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from dsv4.ops import plain

Op = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class OpSet:
    """One form of every operator; see `plain` for what each computes."""

    name: str
    embed: Op
    take: Op
    rms_norm: Op
    rope: Op
    linear: Op
    grouped_linear: Op
    hc_pre: Op
    hc_post: Op
    hc_head: Op
    taps: Op
    addresses: Op
    draft_addresses: Op
    scatter: Op
    write_state: Op
    compress: Op
    hadamard_quantise: Op
    index_topk: Op
    attention: Op
    route: Op
    route_hash: Op
    moe: Op
    argmax: Op
    markov: Op
    begin: Op
    accept: Op
    commit: Op


def op_names() -> tuple[str, ...]:
    """The operators' names, in table order."""
    return tuple(field.name for field in fields(OpSet) if field.name != "name")


def op_set(name: str, module: ModuleType) -> OpSet:
    """The table whose operators are the functions of `module` that bear their names."""
    return OpSet(name=name, **{op: getattr(module, op) for op in op_names()})


PLAIN = op_set("plain", plain)
