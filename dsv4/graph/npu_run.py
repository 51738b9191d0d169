"""Running lowered steps on an NPU: what compiles them, where compiled graphs are kept, and what is missing without one."""

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsv4.errors import PlatformError
from dsv4.graph import ge_passes
from dsv4.graph.npu_load import graph_config, load
from dsv4.graph.stages import Lowered, Traced

CAPTURE_LIMIT = 64  # captured graphs that one compiled function may hold


def why_no_npu() -> str | None:
    """What keeps this process from using an NPU, in one line with what to do instead; None if one is usable."""
    instead = 'use --platform cpu to serve here, or "dsv4 profile" to see what NPUs would do'
    if importlib.util.find_spec("torch_npu") is None:
        return f"torch_npu is not installed (pip install 'dsv4[npu]'); {instead}"
    if not os.environ.get("ASCEND_HOME_PATH"):
        return f"CANN is not set up (ASCEND_HOME_PATH is empty; source its set_env.sh); {instead}"
    try:
        import torch_npu  # noqa: F401  (registers torch.npu)

        count = torch.npu.device_count()
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu does not load with this CANN ({str(error).splitlines()[0]}); {instead}"
    return None if count else f"CANN is there but sees no Ascend device (npu-smi info); {instead}"


def _require_npu(label: str) -> None:
    reason = why_no_npu()
    if reason is not None:
        raise PlatformError(f"{label}: {reason}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def cann_version() -> str:
    """The toolkit's version as its own file says, or "none"."""
    home = Path(os.environ.get("ASCEND_HOME_PATH", "."))
    found = next(iter(sorted(home.glob("*/ascend_toolkit_install.info"))), None)
    lines = found.read_text().splitlines() if found else []
    return next((line.partition("=")[2] for line in lines if line.startswith("version=")), "none")


def cache_key(traced: Traced, rank: int) -> str:
    """Names a compiled program: the captured graph (and so model, shape and layout), the rank, and every compiler's version.

    Compiled graphs carry no guards and do not survive another CANN: whatever could change them is in the key.
    """
    parts = [traced.as_text(), f"rank {rank}", *(f"{p} {_version(p)}" for p in ("torch", "torch_npu")), cann_version()]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
    return f"{traced.program.name}-{digest}"


class BoundStep(nn.Module):
    """A captured step as a method of a module, which is what torchair's cache takes.

    Bound leaves become parameters: the frozen inputs whose addresses a graph may keep.
    """

    def __init__(self, traced: Traced, bound: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.graph = traced.graph_module
        self.positions = sorted(bound)
        self.leaves = nn.ParameterList([nn.Parameter(bound[i], requires_grad=False) for i in self.positions])
        self.free = [i for i in range(len(traced.args_info)) if i not in bound]
        results = [result for result in traced.out_info if result.dtype is not None]
        self.fresh = [k for k, result in enumerate(results) if result.fresh]

    def step(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """The results that are no input, in order, from the leaves that are not bound."""
        full: list[Any] = [None] * (len(self.positions) + len(self.free))
        for i, x in zip(self.positions, self.leaves, strict=True):
            full[i] = x
        for i, x in zip(self.free, leaves, strict=True):
            full[i] = x
        results = self.graph(*full)
        return tuple(results[k] for k in self.fresh)


Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _runner(step: Callable[..., Sequence[Tensor]]) -> Run:
    @torch.no_grad()
    def run(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        return step(*leaves)

    return run


def graph_engine(traced: Traced, bound: Mapping[int, Tensor], *, rank: int = 0, cache: Path | None = None) -> Run:
    """The step compiled whole by the graph engine, from `cache` if it has been compiled there before."""
    _require_npu(traced.label)
    load()
    import torchair

    config, module = graph_config(), BoundStep(traced, bound)
    if cache is None:
        backend = torchair.get_npu_backend(compiler_config=config)
        step = torch.compile(module.step, backend=backend, fullgraph=True, dynamic=False)
    else:
        folder = cache / cache_key(traced, rank)
        step = torchair.inference.cache_compile(
            module.step, config=config, dynamic=False, cache_dir=str(folder), global_rank=rank, ge_cache=True
        )
    run = _runner(step)

    def smaller(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compilation happens in the first call; later ones cost one flag."""
        if smaller.compiled:
            return run(leaves)
        with ge_passes.applied():
            results = run(leaves)
        smaller.compiled = True
        return results

    smaller.compiled = False
    return smaller


class NpuGraphLowered(Lowered):
    """A step for npugraph_ex: captured once on the device as it runs, then replayed."""

    target = "npugraph_ex"

    def build(self, bound: Mapping[int, Tensor], *, pool: Any = None, static_kernels: bool = False) -> Run:
        """`pool` is a graph memory pool (torch.npu.graph_pool_handle()) that programs which never overlap share: results
        are overwritten by the next replay. `static_kernels` also compiles kernels for the very shapes."""
        _require_npu(self.label)
        load()
        options: dict[str, Any] = {
            "frozen_parameter": True,
            "capture_limit": CAPTURE_LIMIT,
            "static_kernel_compile": static_kernels,
            "post_grad_custom_pre_pass": ge_passes.fx_pass,
        }
        if pool is not None:
            options["use_graph_pool"] = pool
        module = BoundStep(self.traced, bound)
        return _runner(
            torch.compile(module.step, backend="npugraph_ex", options=options, fullgraph=True, dynamic=False)
        )
