"""Getting torch_npu and torchair into the process, and how we configure them."""

import os
from typing import Any

from dsv4.graph import cann_shim, ge_passes


def load() -> None:
    """Makes torch_npu and torchair importable: as they are where CANN is, else under the lowering shim."""
    if os.environ.get("ASCEND_HOME_PATH"):
        import torch_npu  # noqa: F401
        import torchair  # noqa: F401
    else:
        cann_shim.install()
    from dsv4.graph import ge_converters  # noqa: F401  (registers them)


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
