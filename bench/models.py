"""What the benchmarks run: the weights of a checkpoint, or random ones of the built-in tiny shape, in every form."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from dsv4.checkpoint.folder import open_checkpoint
from dsv4.checkpoint.load import FileSource, SourceReader, load_params, random_params
from dsv4.checkpoint.manifest import weights
from dsv4.checkpoint.random import random_weights
from dsv4.checkpoint.tiny import tiny_config
from dsv4.config import ModelConfig, config_from_dict, load_config
from dsv4.params import Params

SEED = 0


@dataclass(frozen=True)
class Model:
    """A checkpoint folder, or None for random weights."""

    path: Path | None
    max_positions: int

    @cached_property
    def cfg(self) -> ModelConfig:
        return load_config(self.path) if self.path else config_from_dict(tiny_config())

    def params(self, dtype: torch.dtype | None, k: int) -> Params:
        """float32, or W8A8 for None; with the drafter at K > 0."""
        fields = {"max_positions": self.max_positions + k + 1, "drafter": k > 0}
        if self.path:
            return load_params(self.path, self.cfg, dtype, **fields)
        return random_params(self.cfg, SEED, dtype, **fields)

    def float_weights(self) -> dict[str, Tensor]:
        """Every tensor by its checkpoint name, dequantised to float32."""
        if self.path is None:
            return dict(random_weights(self.cfg, SEED))
        read = SourceReader(self.cfg, FileSource(open_checkpoint(self.path, self.cfg)), torch.float32)
        forms = {w.name: "i32" if w.name.endswith("tid2eid") else "f32" for w in weights(self.cfg)}
        return {name: read(name, form) for name, form in forms.items()}

    def __str__(self) -> str:
        c = self.cfg
        return (
            f"{self.path.name if self.path else 'random weights'}: {c.num_hidden_layers} layers, hidden {c.hidden_size}, "
            f"{c.n_routed_experts} experts of {c.moe_intermediate_size}, top {c.num_experts_per_tok}, vocabulary {c.vocab_size}"
        )
