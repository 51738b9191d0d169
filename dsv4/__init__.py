"""DeepSeek-V4-Flash and its DSpark drafter as pure functions over parameter and cache trees.

    cfg    = dsv4.load_config(path)
    params = dsv4.load_params(path, cfg, dtype=None)
    out    = dsv4.forward(cfg, params, token_ids)          # .logits [S, V], .taps [S, 3D]
    draft  = dsv4.propose(cfg, params, token_ids, k=7)     # .tokens [k], .logits [k, V], .confidence [k]

Names are imported on first use, so that looking at a config does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.api import ForwardOutput, ProposeOutput, forward, propose
    from dsv4.checkpoint.load import load_params
    from dsv4.config import ModelConfig, load_config

_HOMES = {
    "ForwardOutput": "dsv4.api",
    "ModelConfig": "dsv4.config",
    "ProposeOutput": "dsv4.api",
    "forward": "dsv4.api",
    "load_config": "dsv4.config",
    "load_params": "dsv4.checkpoint.load",
    "propose": "dsv4.api",
}
__all__ = ["ForwardOutput", "ModelConfig", "ProposeOutput", "forward", "load_config", "load_params", "propose"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
