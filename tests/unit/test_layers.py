"""The house has floors (design section 8): a room imports from floors below it, never in a circle."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = [
    {"dsv4.errors"},
    {"dsv4.config", "dsv4.tree"},
    {"dsv4.mesh", "dsv4.params"},
    {"dsv4.ops"},
    {"dsv4.cache", "dsv4.batch"},
    {"dsv4.model"},
    {"dsv4.drafter"},
    {"dsv4.steps"},
    {"dsv4.graph", "dsv4.checkpoint"},
    {"dsv4.api", "dsv4.profile"},
    {"serving"},
    {"cli"},
]
NO_TORCH = (
    "serving.scheduler",
    "serving.partition",
    "serving.pages",
    "serving.plan",
    "serving.prefix_cache",
    "serving.request",
)


def floor(module: str) -> int | None:
    """The floor of a module of ours; None for others."""
    for level, rooms in enumerate(FLOORS):
        if any(module == room or module.startswith(room + ".") for room in rooms):
            return level
    return None


def modules() -> dict[str, Path]:
    files = [f for top in ("dsv4", "serving", "cli") for f in (ROOT / top).rglob("*.py")]
    files = [f for f in files if "demo" not in f.relative_to(ROOT).parts]  # a checkpoint: its Python is data
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


@functools.cache
def imports(path: Path, everywhere: bool = False) -> set[str]:
    """Names imported at import time (or anywhere in the file); what is only for type checkers does not count."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)) or (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not everywhere
        ):
            continue
        pending += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_down(module: str) -> None:
    own = floor(module)
    if own is None:  # the package's own front door
        assert module == "dsv4"
        return
    for name in imports(modules()[module]):
        target = floor(name)
        assert target is None or target <= own, f"{module} imports {name} from a floor above"


@pytest.mark.parametrize("module", NO_TORCH)
def test_integers_only(module: str) -> None:
    """The scheduler and what it stands on run without torch."""
    assert not {name.split(".")[0] for name in imports(modules()[module], everywhere=True)} & {"torch", "numpy"}


def test_no_circles() -> None:
    known = modules()
    graph = {m: {n for n in imports(p) if n in known and n != m} for m, p in known.items()}
    state: dict[str, int] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        if state.get(module) == 1:
            raise AssertionError(" -> ".join((*path[path.index(module) :], module)))
        if module not in state:
            state[module] = 1
            for other in graph[module]:
                visit(other, (*path, module))
            state[module] = 2

    for module in graph:
        visit(module, ())
