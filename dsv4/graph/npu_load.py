"""Getting torch_npu and torchair into the process, and how we configure them."""

import contextlib
import os
from typing import Any

from dsv4.errors import PlatformError
from dsv4.graph import cann_shim, ge_passes
from dsv4.ops import npu_schemas


def load() -> None:
    """Makes torch_npu and torchair importable: as they are where CANN is, else under the lowering shim. Raises PlatformError."""
    if os.environ.get("ASCEND_HOME_PATH"):
        try:
            import torch_npu  # noqa: F401
            import torchair  # noqa: F401
        except (ImportError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise PlatformError(f"torch_npu does not load with the CANN of ASCEND_HOME_PATH ({reason})") from error
    else:
        cann_shim.install()
    from dsv4.graph import ge_converters  # noqa: F401  (registers them)


def load_or_declare() -> None:
    """torch_npu's operators, or where it cannot be had their declarations: never both, torch_npu aborts on the second.
    Idempotent, and safe before `load`."""
    with contextlib.suppress(PlatformError):
        load()
    npu_schemas.declare()


def graph_config() -> Any:
    """torchair's configuration for static decode graphs (GE)."""
    import torchair

    config = torchair.CompilerConfig()
    experimental = config.experimental_config
    config.post_grad_custom_pre_pass = ge_passes.fx_pass
    experimental.frozen_parameter = True
    experimental.tiling_schedule_optimize = True
    # The other orders may swap two collectives of one group between ranks.
    experimental.topology_sorting_strategy = "StableRDFS"
    return config
