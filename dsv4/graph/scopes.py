"""Which part of the model a captured node belongs to, from the lines that made it.

A scope is a tuple such as ("layer 3", "attention", "csa", "index_topk"): the unrolled layer, then the model's functions, then the
named operator. Layers are told apart by control flow: the lines of the layer's function only ever go down, so a line above
the last one seen means that the next layer has begun.
"""

from torch.fx import Graph, Node

SCOPE = "dsv4_scope"
_LAYER, _STAGE = "layer", "run_block"
_SKIPPED = {"step", "backbone", "flat", "<listcomp>", "<genexpr>", "<dictcomp>"}


def scopes(graph: Graph) -> dict[Node, tuple[str, ...]]:
    """Scope of every operator call of a recorded graph."""
    found: dict[Node, tuple[str, ...]] = {}
    counts = {_LAYER: 0, _STAGE: 0}
    last = {_LAYER: 0, _STAGE: 0}
    for node in graph.nodes:
        frames = node.meta.get("frames")
        if node.op != "call_function" or not frames:
            continue
        names: list[str] = []
        for frame in reversed(frames):  # outermost first
            name = frame.code.co_name
            if name in counts:
                if frame.line < last[name]:
                    counts[name] += 1
                last[name] = frame.line
                names.append(f"{'layer' if name == _LAYER else 'stage'} {counts[name]}")
            elif name not in _SKIPPED and not name.startswith("_"):
                names.append(name)
        found[node] = tuple(names)
    return found
