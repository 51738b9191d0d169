"""What differs between a CPU and an Ascend NPU: where tensors live, which operators run, who compiles, who communicates."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from dsv4.config import StepShape
from dsv4.errors import ConfigError, PlatformError
from dsv4.graph.npu_run import why_no_npu
from dsv4.graph.targets import targets
from dsv4.mesh import Mesh
from dsv4.ops import cpu_params
from dsv4.ops.capturable import CAPTURABLE
from dsv4.ops.cpu import CPU, default_ops
from dsv4.ops.table import OpSet
from dsv4.params import Params
from dsv4.tree import map_leaves

log = logging.getLogger("dsv4.engine")

OpsFor = Callable[[StepShape], OpSet]
NPU_TARGETS = ("npugraph_ex", "torchair")


@dataclass(frozen=True, kw_only=True)
class Platform:
    """`target` compiles the programs; `backend` is torch.distributed's."""

    name: Literal["cpu", "a2a3"]
    target: str
    backend: Literal["gloo", "hccl"]

    def device(self, index: int) -> str:
        """Where a rank's tensors live."""
        return f"npu:{index}" if self.name == "a2a3" else "cpu"

    def ops(self, mesh: Mesh) -> OpsFor:
        """The op table of each program on one rank."""
        if self.name == "a2a3":
            from dsv4.ops.npu import npu_ops

            return lambda shape: npu_ops(shape.query_len, mesh)
        table = CAPTURABLE if self.target in ("plain", "inductor") else default_ops()
        return lambda shape: table

    def place(self, params: Params, index: int, *, release: bool = False) -> Params:
        """Loaded parameters where and how the operators want them: in panels for CPU kernels; on NPUs moved, packed, and int8
        matrices cast to NZ. release: `params` is not used any more."""
        if self.name == "cpu":
            return cpu_params.prepare(params, release=release) if self.target == CPU.name else params
        from dsv4.ops.npu_params import prepare, to_fractal

        return to_fractal(prepare(map_leaves(lambda x: x.to(self.device(index)), params)))


def choose_platform(name: str, target: str = "auto") -> Platform:
    """`auto` takes an NPU where one is usable, else the CPU. Raises ConfigError, or PlatformError for a2a3 without NPUs."""
    if name not in ("auto", "cpu", "a2a3"):
        raise ConfigError(f"--platform is {name!r}, expected a2a3, cpu or auto")
    if target != "auto" and target not in targets():
        raise ConfigError(f"--target is {target!r}, expected auto or one of {', '.join(targets())}")
    reason = None if name == "cpu" else why_no_npu()
    if name == "a2a3" and reason is not None:
        raise PlatformError(f"--platform a2a3: {reason}")
    if name == "cpu" or reason is not None:
        if target in NPU_TARGETS:
            raise ConfigError(f"--target {target} needs an NPU: {reason or 'drop --platform cpu'}")
        return Platform(name="cpu", target=default_ops().name if target == "auto" else target, backend="gloo")
    if target not in ("auto", *NPU_TARGETS):
        raise ConfigError(f"--target {target} runs on CPUs; on NPUs expected one of {', '.join(NPU_TARGETS)}")
    torch.npu.config.allow_internal_format = True  # NZ matrices
    return Platform(name="a2a3", target=NPU_TARGETS[0] if target == "auto" else target, backend="hccl")
