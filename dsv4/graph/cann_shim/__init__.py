"""torch_npu and torchair on a host without CANN, for lowering only: graphs are made here and never run.

The pretended product is an Atlas A3 die under CANN 9.1; a successful lowering proves the conversion and the shape functions,
not that a given CANN release has every kernel.
"""

import contextlib
import ctypes
import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path

from dsv4.errors import PlatformError
from dsv4.graph.cann_shim.build import SONAMES, build

SOC = "Ascend910_9382"  # an Atlas A3 die
CANN = "9.1.0"  # the release whose feature gates lowering assumes
_done = False


class LoweringOnly(PlatformError):
    """Something tried to run, compile or load a graph under the shim."""


def refuse(what: str):
    """A function that says why `what` cannot be done here."""

    def refused(*_args, **_kwargs):
        raise LoweringOnly(f"{what}: this host has no NPU; under the lowering shim graphs are made and never run")

    return refused


def cache_folder() -> Path:
    """Where built stand-ins are kept: $XDG_CACHE_HOME/dsv4, else ~/.cache/dsv4."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4"


def _assume(version: str, torch_npu: types.ModuleType) -> None:
    """Answers torch_npu's "is CANN at least X" questions as that release would."""
    from packaging.version import InvalidVersion, Version

    def parse(text: str) -> Version:
        try:
            return Version(text.replace("RC", "rc").replace(".alpha", "a"))
        except InvalidVersion:
            return Version("0")

    answers = {
        "_is_gte_cann_version": lambda wanted, module="CANN": parse(version) >= parse(wanted),
        "get_cann_version": lambda module="CANN": version,
    }
    for module in [m for name, m in sys.modules.items() if name.startswith(("torch_npu", "torchair"))]:
        for name, answer in answers.items():
            if callable(getattr(module, name, None)) and module is not torch_npu._C:
                setattr(module, name, answer)


def _preload(folder: Path) -> None:
    for name in ["libcann_shim.so", *(folder / SONAMES).read_text().split()]:
        # The loader matches later NEEDED entries by SONAME against what is loaded.
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def install(*, devices: int = 1) -> None:
    """Builds and loads the stand-ins, imports torch_npu and torchair, and answers their questions about the device.

    One pretended device lets fake tensors live on "npu:0"; with none, Dynamo's entry points trace CPU tensors. Idempotent.
    Raises PlatformError without torch_npu or a compiler, and where CANN is set up: the shim must not shadow it.
    """
    global _done
    if _done:
        return
    if os.environ.get("ASCEND_HOME_PATH"):
        raise PlatformError("ASCEND_HOME_PATH is set: this host has CANN, and the lowering shim must not shadow it")
    if "torch_npu" in sys.modules:
        raise PlatformError("torch_npu is already imported; install the shim first")
    os.environ |= {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CANN_SHIM_SOC": SOC,
        "CANN_SHIM_DEVICES": str(devices),
    }
    _preload(build(cache_folder()))
    with warnings.catch_warnings(), open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        warnings.simplefilter("ignore")  # it warns that CANN's variables are not set, which is the point
        import torch_npu

        if importlib.util.find_spec("torchair") is None:  # importing torch_npu puts it on the path
            raise PlatformError("this torch_npu does not bundle torchair; install torch_npu 2.13.0")
        import torchair  # noqa: F401
    from torchair._ge_concrete_graph import compat_ir
    from torchair.core import _backend
    from torchair.ge import ge_custom

    _backend._cached_device_id = 0
    compat_ir.is_cann_compat = lambda *_args, **_kwargs: ""  # asks the op library of an installed CANN
    # torchair.ge.custom_op asks CANN whether the type is registered; its explicit form needs no more than a yes.
    ge_custom._torchair = types.SimpleNamespace(get_registered_ir_def=lambda name: ("SUCCESS", (), (), ()))
    torch_npu.npu.get_device_name = lambda *_args: SOC
    torch_npu.npu._lazy_init = lambda: None  # some shape functions ask for it
    _assume(CANN, torch_npu)
    for method in ("load", "compile", "run", "auto_tune"):
        setattr(_backend.TorchNpuGraph, method, refuse(f"TorchNpuGraph.{method}"))
    torch_npu.npu.synchronize = refuse("torch.npu.synchronize")
    _done = True


def active() -> bool:
    """Whether this process lowers under the shim."""
    return _done


def fake_world(rank: int, ranks: int) -> None:
    """A process group of `ranks` that never communicates, as capture needs to know ranks and sizes only."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
