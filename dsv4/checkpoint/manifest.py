"""Every tensor of a checkpoint, derived from its config alone: name, dtype and shape, as released and as W8A8.

`weights(cfg)` walks the architecture once. A `Weight` is one logical parameter; `stored` says which tensors hold it in a
given form. `totals` of the released configs equal the published `metadata.total_size` to the byte.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dsv4.config import ModelConfig
from dsv4.errors import ConfigError

Form = Literal["source", "w8a8"]
Encoding = Literal["fp8", "mxfp4", "bf16", "f32", "i64"]

TILE = 128  # FP8: one scale per 128 x 128 tile
GROUP = 32  # MXFP4: one scale per 32 columns of a row
ITEMSIZE = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
PLAIN_DTYPES = {"bf16": "BF16", "f32": "F32", "i64": "I64"}


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter. `encoding` is how the release stores it; `int8` whether W8A8 keeps it as int8 or as bf16."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    int8: bool = False

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix("weight") + "scale"

    @property
    def is_draft(self) -> bool:
        return self.name.startswith("mtp.")

    @property
    def kind(self) -> str:
        """The name without layer and expert numbers: what reports group by."""
        return re.sub(r"^(layers|mtp)\.\d+\.|\.\d+(?=\.)", "", self.name).removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor on disk; `dtype` is the tag in the safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEMSIZE[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def stored(weight: Weight, form: Form) -> tuple[TensorSpec, ...]:
    """The tensors that hold `weight` on disk: values first, then the scale if there is one.

    Raises: ConfigError if an expert matrix has columns that MXFP4 cannot group.
    """
    if weight.encoding in PLAIN_DTYPES:
        return (TensorSpec(weight.name, PLAIN_DTYPES[weight.encoding], weight.shape),)
    rows, cols = weight.shape
    if form == "w8a8":
        if weight.int8:
            return TensorSpec(weight.name, "I8", (rows, cols)), TensorSpec(weight.scale_name, "F32", (rows,))
        return (TensorSpec(weight.name, "BF16", (rows, cols)),)
    if weight.encoding == "mxfp4":  # two 4-bit codes per byte
        if cols % GROUP:
            raise ConfigError(f"{weight.name}: {cols} columns; MXFP4 needs a multiple of {GROUP}")
        return (
            TensorSpec(weight.name, "I8", (rows, cols // 2)),
            TensorSpec(weight.scale_name, "F8_E8M0", (rows, cols // GROUP)),
        )
    tiles = (-(-rows // TILE), -(-cols // TILE))
    return TensorSpec(weight.name, "F8_E4M3", (rows, cols)), TensorSpec(weight.scale_name, "F8_E8M0", tiles)


def _hyper_head(cfg: ModelConfig, prefix: str) -> Iterator[Weight]:
    n = cfg.hc_mult
    yield Weight(f"{prefix}hc_head_fn", (n, n * cfg.hidden_size), "f32")
    yield Weight(f"{prefix}hc_head_base", (n,), "f32")
    yield Weight(f"{prefix}hc_head_scale", (1,), "f32")


def _compressor(cfg: ModelConfig, prefix: str, ratio: int, width: int) -> Iterator[Weight]:
    wide = 2 * width if ratio == 4 else width  # ratio 4 pools overlapping windows
    yield Weight(f"{prefix}wkv.weight", (wide, cfg.hidden_size), "bf16")
    yield Weight(f"{prefix}wgate.weight", (wide, cfg.hidden_size), "bf16")
    yield Weight(f"{prefix}ape", (ratio, wide), "f32")
    yield Weight(f"{prefix}norm.weight", (width,), "bf16")


def _attention(cfg: ModelConfig, prefix: str, ratio: int) -> Iterator[Weight]:
    hidden, q_rank, o_rank = cfg.hidden_size, cfg.q_lora_rank, cfg.o_groups * cfg.o_lora_rank
    width = cfg.num_attention_heads * cfg.head_dim
    yield Weight(f"{prefix}q_norm.weight", (q_rank,), "bf16")
    yield Weight(f"{prefix}kv_norm.weight", (cfg.head_dim,), "bf16")
    yield Weight(f"{prefix}attn_sink", (cfg.num_attention_heads,), "f32")
    yield Weight(f"{prefix}wq_a.weight", (q_rank, hidden), "fp8")
    yield Weight(f"{prefix}wq_b.weight", (width, q_rank), "fp8", int8=True)
    yield Weight(f"{prefix}wkv.weight", (cfg.head_dim, hidden), "fp8")
    yield Weight(f"{prefix}wo_a.weight", (o_rank, width // cfg.o_groups), "fp8")
    yield Weight(f"{prefix}wo_b.weight", (hidden, o_rank), "fp8", int8=True)
    if ratio:
        yield from _compressor(cfg, f"{prefix}compressor.", ratio, cfg.head_dim)
    if ratio == 4:
        index_width = cfg.index_n_heads * cfg.index_head_dim
        yield Weight(f"{prefix}indexer.wq_b.weight", (index_width, q_rank), "fp8", int8=True)
        yield Weight(f"{prefix}indexer.weights_proj.weight", (cfg.index_n_heads, hidden), "bf16")
        yield from _compressor(cfg, f"{prefix}indexer.compressor.", ratio, cfg.index_head_dim)


def _moe(cfg: ModelConfig, prefix: str, hashed: bool) -> Iterator[Weight]:
    hidden, inter = cfg.hidden_size, cfg.moe_intermediate_size
    yield Weight(f"{prefix}gate.weight", (cfg.n_routed_experts, hidden), "bf16")
    if hashed:
        yield Weight(f"{prefix}gate.tid2eid", (cfg.vocab_size, cfg.num_experts_per_tok), "i64")
    else:
        yield Weight(f"{prefix}gate.bias", (cfg.n_routed_experts,), "f32")
    experts = [(f"experts.{e}.", "mxfp4") for e in range(cfg.n_routed_experts)] + [("shared_experts.", "fp8")]
    for stem, encoding in experts:
        yield Weight(f"{prefix}{stem}w1.weight", (inter, hidden), encoding, int8=True)
        yield Weight(f"{prefix}{stem}w2.weight", (hidden, inter), encoding, int8=True)
        yield Weight(f"{prefix}{stem}w3.weight", (inter, hidden), encoding, int8=True)


def _block(cfg: ModelConfig, prefix: str, ratio: int, hashed: bool) -> Iterator[Weight]:
    mix = cfg.hc_mult * (cfg.hc_mult + 2)
    yield Weight(f"{prefix}attn_norm.weight", (cfg.hidden_size,), "bf16")
    yield Weight(f"{prefix}ffn_norm.weight", (cfg.hidden_size,), "bf16")
    for site in ("attn", "ffn"):
        yield Weight(f"{prefix}hc_{site}_fn", (mix, cfg.hc_mult * cfg.hidden_size), "f32")
        yield Weight(f"{prefix}hc_{site}_base", (mix,), "f32")
        yield Weight(f"{prefix}hc_{site}_scale", (3,), "f32")
    yield from _attention(cfg, f"{prefix}attn.", ratio)
    yield from _moe(cfg, f"{prefix}ffn.", hashed)


def _dspark_heads(cfg: ModelConfig, prefix: str, stage: int) -> Iterator[Weight]:
    hidden, rank = cfg.hidden_size, cfg.dspark_markov_rank
    if stage == 0:
        yield Weight(f"{prefix}main_proj.weight", (hidden, hidden * len(cfg.dspark_target_layer_ids)), "fp8")
        yield Weight(f"{prefix}main_norm.weight", (hidden,), "bf16")
    if stage == cfg.num_stages - 1:
        yield Weight(f"{prefix}norm.weight", (hidden,), "bf16")
        yield Weight(f"{prefix}markov_head.markov_w1.weight", (cfg.vocab_size, rank), "bf16")
        yield Weight(f"{prefix}markov_head.markov_w2.weight", (cfg.vocab_size, rank), "bf16")
        yield Weight(f"{prefix}confidence_head.proj.weight", (1, hidden + rank), "bf16")
        yield from _hyper_head(cfg, prefix)


def _classic_mtp_heads(cfg: ModelConfig, prefix: str) -> Iterator[Weight]:
    """The single MTP layer of releases without DSpark (V4-Flash preview, V4-Pro)."""
    hidden = cfg.hidden_size
    yield Weight(f"{prefix}enorm.weight", (hidden,), "bf16")
    yield Weight(f"{prefix}hnorm.weight", (hidden,), "bf16")
    yield Weight(f"{prefix}e_proj.weight", (hidden, hidden), "fp8", int8=True)
    yield Weight(f"{prefix}h_proj.weight", (hidden, hidden), "fp8", int8=True)
    yield Weight(f"{prefix}norm.weight", (hidden,), "bf16")
    yield from _hyper_head(cfg, prefix)


def _walk(cfg: ModelConfig) -> Iterator[Weight]:
    yield Weight("embed.weight", (cfg.vocab_size, cfg.hidden_size), "bf16")
    for layer in range(cfg.num_hidden_layers):
        yield from _block(cfg, f"layers.{layer}.", cfg.compress_ratios[layer], layer < cfg.num_hash_layers)
    yield Weight("norm.weight", (cfg.hidden_size,), "bf16")
    yield from _hyper_head(cfg, "")
    yield Weight("head.weight", (cfg.vocab_size, cfg.hidden_size), "bf16")
    for stage in range(cfg.num_stages):
        prefix = f"mtp.{stage}."
        yield from _dspark_heads(cfg, prefix, stage) if cfg.has_dspark else _classic_mtp_heads(cfg, prefix)
        yield from _block(cfg, prefix, 0, hashed=False)


@lru_cache(maxsize=4)
def weights(cfg: ModelConfig) -> tuple[Weight, ...]:
    """Every parameter of the model, target first, in the order of the release's shards."""
    return tuple(_walk(cfg))


def manifest(cfg: ModelConfig, form: Form) -> dict[str, TensorSpec]:
    """Every tensor a checkpoint of this form holds, by name."""
    return {spec.name: spec for weight in weights(cfg) for spec in stored(weight, form)}


def shard_name(cfg: ModelConfig, weight_name: str) -> str:
    """The release's file for a tensor: embedding, one per layer, final norm and head, one per draft stage."""
    first, *rest = weight_name.split(".")
    files = cfg.num_hidden_layers + 2 + cfg.num_stages
    if first == "embed":
        number = 1
    elif first == "layers":
        number = 2 + int(rest[0])
    else:
        number = cfg.num_hidden_layers + 2 + (1 + int(rest[0]) if first == "mtp" else 0)
    return f"model-{number:05d}-of-{files:05d}.safetensors"


@dataclass(frozen=True)
class Totals:
    """Tensors and payload bytes (headers not counted), as in the index's `metadata.total_size`."""

    tensors: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.tensors:,} tensors, {self.nbytes:,} bytes ({self.nbytes / 2**30:.3f} GiB)"


def totals(specs: Iterable[TensorSpec]) -> Totals:
    sizes = [spec.nbytes for spec in specs]
    return Totals(len(sizes), sum(sizes))
