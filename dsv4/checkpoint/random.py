"""Random weights for every parameter of a model, chosen so that a tiny model behaves like a real one.

No parameter sits at a neutral value (ones, zeros): a mistake in any of them must show. Streams stay of order one through
depth, attention scores and routers have real spread, and logits have a standard deviation of several units, so that
argmax survives int8 and greedy text wanders.

Each tensor depends on the seed and its own name only, so any subset, order or slicing gives the same values.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dsv4.checkpoint.manifest import GROUP, TILE, Weight, weights
from dsv4.config import ModelConfig

# Standard deviation of what a matrix puts out for inputs of order one, by kind; 1 where not named.
GAINS = {
    "head": 4.0,
    "markov_head.markov_w2": 1.5,
    "attn.wo_a": 2.0,
    "attn.wo_b": 1.5,
    "ffn.experts.w2": 2.0,
    "ffn.shared_experts.w2": 2.0,
    "confidence_head.proj": 1.5,
}
# (mean, standard deviation) of vectors and tables, by the last part of the name.
SPREADS = {
    "attn_sink": (0.5, 1.0),
    "ape": (0.0, 0.7),
    "bias": (0.0, 0.3),
    "hc_attn_base": (0.0, 0.8),
    "hc_ffn_base": (0.0, 0.8),
    "hc_head_base": (0.0, 0.8),
    "hc_attn_scale": (0.6, 0.15),
    "hc_ffn_scale": (0.6, 0.15),
    "hc_head_scale": (0.6, 0.15),
}
EMBEDDINGS = ("embed", "markov_head.markov_w1")


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")])


def _block_gains(rng: np.random.Generator, weight: Weight) -> np.ndarray:
    """Powers of two per scale block, so that neighbouring scales differ and a misplaced one is visible."""
    rows, cols = weight.shape
    height, width = (TILE, TILE) if weight.encoding == "fp8" else (1, GROUP)
    exponents = rng.integers(-1, 2, (-(-rows // height), -(-cols // width)))
    gains = np.exp2(exponents).repeat(height, 0).repeat(width, 1)[:rows, :cols]
    return (gains / np.sqrt(np.mean(gains**2))).astype(np.float32)


def random_weight(cfg: ModelConfig, weight: Weight, seed: int) -> Tensor:
    """One parameter in float32 (tid2eid: int64), in its logical shape."""
    rng, kind = _generator(seed, weight.name), weight.kind
    if kind == "ffn.gate.tid2eid":  # distinct experts per token
        order = rng.random((cfg.vocab_size, cfg.n_routed_experts)).argsort(axis=1)
        return torch.from_numpy(order[:, : cfg.num_experts_per_tok].copy())
    last = kind.rsplit(".", 1)[-1]
    if last in SPREADS:
        mean, deviation = SPREADS[last]
        return torch.from_numpy((mean + deviation * rng.standard_normal(weight.shape)).astype(np.float32))
    if len(weight.shape) == 1:  # norm weights
        return torch.from_numpy(rng.uniform(0.6, 1.4, weight.shape).astype(np.float32))
    values = rng.standard_normal(weight.shape, dtype=np.float32)
    if kind not in EMBEDDINGS:
        values *= np.float32(GAINS.get(kind, 1.0) / np.sqrt(weight.shape[1]))
    if weight.encoding in ("fp8", "mxfp4"):
        values *= _block_gains(rng, weight)
    return torch.from_numpy(values)


def random_weights(cfg: ModelConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the model with its name, one at a time, before any quantisation."""
    for weight in weights(cfg):
        yield weight.name, random_weight(cfg, weight, seed)
