"""What a captured step does to memory: who is written, who is read before, who comes back.

Two tensors are the same memory iff they share a storage, so every question here is asked of storages, whatever views lie
between. A donated leaf that is written has to come back as the same leaf: that is what lets every target write it in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from dsv4.errors import CaptureError
from dsv4.graph.nodes import is_view, nodes_in, op_name, storage, tensors_in, written_nodes
from dsv4.graph.record import source


@dataclass(frozen=True)
class Access:
    """Reads and writes of one input leaf, in program order: (position in the graph, node)."""

    reads: tuple[tuple[int, Node], ...]
    writes: tuple[tuple[int, Node], ...]


def accesses(graph: Graph, owners: Mapping[int, str]) -> dict[str, Access]:
    """Access by leaf path; `owners` maps storages of inputs to paths. Views do not count: reading one later does."""
    reads: dict[str, list[tuple[int, Node]]] = {path: [] for path in owners.values()}
    writes: dict[str, list[tuple[int, Node]]] = {path: [] for path in owners.values()}
    for at, node in enumerate(graph.nodes):
        if node.op != "call_function" or is_view(node):
            continue
        written = written_nodes(node)
        for arg in nodes_in((node.args, node.kwargs)):
            for x in tensors_in(arg.meta["val"]):
                path = owners.get(storage(x))
                if path is not None:
                    (writes if arg in written else reads)[path].append((at, node))
    return {path: Access(tuple(reads[path]), tuple(writes[path])) for path in reads}


def check_donation(
    label: str,
    found: Mapping[str, Access],
    donated: Mapping[str, str],
    returned: Mapping[str, Sequence[str]],
    fresh: Sequence[str],
) -> None:
    """Raises CaptureError for a write to a leaf that is not donated, and for a donated leaf that does not come back as itself.

    donated: path -> path inside its argument; returned: input path -> paths of the output leaves that are that leaf; fresh:
    paths of the other output tensors.
    """
    for path, within in donated.items():
        instead = [out for out in fresh if within and out.endswith(within)]
        if path not in returned and instead:
            raise CaptureError(
                f"{label}: {path} is donated, but {instead[0]} of the result is a new tensor; write the leaf in place and "
                "return it"
            )
    for path, access in found.items():
        if not access.writes:
            continue
        node = access.writes[0][1]
        if path not in donated:
            raise CaptureError(
                f"{label}: {op_name(node)} writes {path}, which is not donated ({source(node)}); donate the argument, or "
                "write a copy"
            )
        back = returned.get(path, ())
        if not back:
            raise CaptureError(
                f"{label}: {path} is donated and written by {op_name(node)} ({source(node)}) but not returned; return the "
                "leaf that was written"
            )
        if not any(out.endswith(donated[path]) for out in back):
            raise CaptureError(
                f"{label}: {path} is written in place but comes back as {', '.join(back)}; return it in its own place"
            )


def early_reads(found: Mapping[str, Access]) -> tuple[str, ...]:
    """Reads of a leaf before its first write, one line each: what makes a lowering copy a whole pool."""
    return tuple(
        f"{path}: {op_name(reader)} reads it ({source(reader)}) before {op_name(access.writes[0][1])} writes it "
        f"({source(access.writes[0][1])})"
        for path, access in found.items()
        if access.writes
        for at, reader in access.reads
        if at < access.writes[0][0]
    )


def repeated_writes(found: Mapping[str, Access]) -> tuple[str, ...]:
    """Leaves written more than once in the step, one line each."""
    return tuple(
        f"{path}: written {len(access.writes)} times, again by {op_name(access.writes[1][1])} "
        f"({source(access.writes[1][1])})"
        for path, access in found.items()
        if len(access.writes) > 1
    )
