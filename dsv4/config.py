"""What is fixed before any step is captured: the model, the parallel layout, the shape of a step.

Field names of `ModelConfig` are those of the released config.json. Everything is frozen and hashable; step functions
close over it, nothing mutates it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dsv4.errors import CheckpointError, ConfigError

LayerKind = Literal["swa", "csa", "hca"]
KINDS: dict[int, LayerKind] = {0: "swa", 4: "csa", 128: "hca"}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN on the compressed-layer table (no mscale: cos and sin are not multiplied by anything)."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """DeepSeek-V4-Flash with DSpark. `quant_format` says how the files store weights: source, w8a8 or none."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_hash_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    swiglu_limit: float = 10.0
    routed_scaling_factor: float = 1.5
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = RopeScaling()
    bos_token_id: int = 0
    eos_token_id: int = 1
    dspark_block_size: int | None = None
    dspark_noise_token_id: int | None = None
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int | None = None
    quant_format: Literal["source", "w8a8", "none"] = "source"

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Attention kind of each target layer."""
        return tuple(KINDS[r] for r in self.compress_ratios[: self.num_hidden_layers])

    @property
    def num_stages(self) -> int:
        """Draft stages in the checkpoint (`num_nextn_predict_layers` is a leftover and not consulted)."""
        return len(self.compress_ratios) - self.num_hidden_layers

    @property
    def has_dspark(self) -> bool:
        return bool(self.dspark_target_layer_ids)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:
        return self._hash

    def validate(self) -> "ModelConfig":
        """Raises ConfigError naming the first field that no V4-Flash-like model can have; returns self."""

        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"config.json: {name} is {getattr(self, name)!r}, expected {expected}")

        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank",
                     "o_lora_rank", "o_groups", "sliding_window", "index_n_heads", "index_head_dim", "index_topk",
                     "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "hc_mult", "hc_sinkhorn_iters",
                     "max_position_embeddings"):  # fmt: skip
            need(getattr(self, name) > 0, name, "a positive integer")
        ratios = self.compress_ratios
        need(len(ratios) >= self.num_hidden_layers, "compress_ratios", f"at least {self.num_hidden_layers} entries")
        need(set(ratios) <= set(KINDS), "compress_ratios", "only 0, 4 and 128")
        need(not any(ratios[self.num_hidden_layers :]), "compress_ratios", "0 for every draft stage")
        need(0 <= self.num_hash_layers <= self.num_hidden_layers, "num_hash_layers", "0..num_hidden_layers")
        need(self.num_experts_per_tok <= self.n_routed_experts, "num_experts_per_tok", "at most n_routed_experts")
        need(self.num_attention_heads % self.o_groups == 0, "o_groups", "a divisor of num_attention_heads")
        rope = self.qk_rope_head_dim
        need(rope % 2 == 0 and 0 < rope <= min(self.head_dim, self.index_head_dim), "qk_rope_head_dim",
             "even and at most head_dim and index_head_dim")  # fmt: skip
        need(self.index_head_dim & (self.index_head_dim - 1) == 0, "index_head_dim", "a power of two (Hadamard)")
        if self.has_dspark:
            need(len(self.dspark_target_layer_ids) == self.num_stages, "dspark_target_layer_ids",
                 f"{self.num_stages} layers, one for each draft entry of compress_ratios")  # fmt: skip
            need(all(0 <= i < self.num_hidden_layers for i in self.dspark_target_layer_ids), "dspark_target_layer_ids",
                 f"layer ids below {self.num_hidden_layers}")  # fmt: skip
        return self


def _refuse_other_models(raw: dict[str, Any], where: Path) -> None:
    model_type = raw.get("model_type")
    if model_type != "deepseek_v4" or "text_config" in raw:
        nested = " with a nested text_config (V4.1)" if "text_config" in raw else ""
        raise CheckpointError(
            f"{where}: model_type is {model_type!r}{nested}; this project serves 'deepseek_v4' (V4-Flash) only"
        )
    if raw.get("vision_n_layers"):
        raise CheckpointError(
            f"{where}: vision_n_layers is {raw['vision_n_layers']}; the vision model is not supported"
        )
    for name, expected in (("num_key_value_heads", 1), ("n_shared_experts", 1), ("hidden_act", "silu"),
                           ("scoring_func", "sqrtsoftplus"), ("tie_word_embeddings", False),
                           ("norm_topk_prob", True)):  # fmt: skip
        if raw.get(name, expected) != expected:
            raise CheckpointError(f"{where}: {name} is {raw[name]!r}; V4-Flash has {expected!r}")


def _quant_format(raw: dict[str, Any], where: Path) -> Literal["source", "w8a8", "none"]:
    quant = raw.get("quantization_config")
    if not quant:
        return "none"
    if not isinstance(quant, dict):
        raise CheckpointError(f"{where}: quantization_config: expected a JSON object, got {json.dumps(quant)}")
    method = quant.get("quant_method")
    if method == "fp8" and raw.get("expert_dtype") == "fp4":
        return "source"
    if method == "compressed-tensors" and quant.get("format") == "int-quantized":
        return "w8a8"
    raise CheckpointError(
        f"{where}: quant_method {method!r} with expert_dtype {raw.get('expert_dtype')!r} is neither the released source "
        "format (fp8 + fp4 experts) nor W8A8 (compressed-tensors, int-quantized)"
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Annotation of a field -> what JSON must hold there, and whether it does.
_JSON_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer", _is_int),
    int | None: ("an integer", _is_int),
    float: ("a finite number", lambda value: (_is_int(value) or isinstance(value, float)) and math.isfinite(value)),
    tuple[int, ...]: ("a list of integers", lambda value: isinstance(value, list) and all(map(_is_int, value))),
}


def _read_fields(raw: Any, kind: type, where: str) -> dict[str, Any]:
    """Values of the fields of a dataclass that `raw` gives, null standing for "not given". Raises CheckpointError."""
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {json.dumps(raw)}")
    values = {}
    for field in fields(kind):
        value = raw.get(field.name)
        if value is None or field.type not in _JSON_TYPES:
            continue
        expected, accepts = _JSON_TYPES[field.type]
        if not accepts(value):
            raise CheckpointError(f"{where}: {field.name} is {json.dumps(value)}, expected {expected}")
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def config_from_dict(raw: dict[str, Any], where: Path = Path("config.json")) -> ModelConfig:
    """Reads a released or converted config; unknown keys are left alone, missing and mistyped ones are named.

    Raises CheckpointError or ConfigError.
    """
    _refuse_other_models(raw, where)
    values = _read_fields(raw, ModelConfig, str(where))
    if missing := [f.name for f in fields(ModelConfig) if f.default is MISSING and f.name not in values]:
        raise CheckpointError(f"{where}: missing {', '.join(missing)}")
    scaling = _read_fields(raw.get("rope_scaling") or {}, RopeScaling, f"{where}: rope_scaling")
    return ModelConfig(**values, rope_scaling=RopeScaling(**scaling), quant_format=_quant_format(raw, where)).validate()


def load_config(path: str | Path) -> ModelConfig:
    """Reads `path` (a checkpoint folder or its config.json). Raises CheckpointError or ConfigError."""
    where = Path(path)
    where = where / "config.json" if where.is_dir() else where
    try:
        raw = json.loads(where.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{where}: no such file; expected a checkpoint folder with a config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: expected a JSON object")
    return config_from_dict(raw, where)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """dp x tp = ep ranks: attention splits heads over tp, experts split over ep, requests over dp groups."""

    dp: int = 1
    tp: int = 1
    ep: int = 1

    def validate(self, cfg: ModelConfig) -> "ParallelConfig":
        """Raises ConfigError if the layout does not fit together or does not divide the model; returns self."""
        if min(self.dp, self.tp, self.ep) < 1 or self.dp * self.tp != self.ep:
            raise ConfigError(f"--dp {self.dp} --tp {self.tp} --ep {self.ep}: expected dp x tp = ep, all at least 1")
        for flag, size, name in (("--tp", self.tp, "num_attention_heads"), ("--tp", self.tp, "o_groups"),
                                 ("--tp", self.tp, "hidden_size"), ("--tp", self.tp, "vocab_size"),
                                 ("--ep", self.ep, "n_routed_experts")):  # fmt: skip
            if getattr(cfg, name) % size:
                raise ConfigError(f"{flag} {size} does not divide {name} = {getattr(cfg, name)} of this model")
        return self


StepKind = Literal["prefill", "decode", "speculate", "seed"]


@dataclass(frozen=True)
class StepShape:
    """The static shape of a step program, and its key.

    rows: requests (or, for prefill, tiles) in the step; query_len: tokens per row; pages: history pages (of 128
    tokens) the step can see, i.e. the longest context is 128 * pages tokens; full: the step also takes token masks and
    given drafts, and returns log-probabilities (constrained output, `logprobs`).
    """

    kind: StepKind
    rows: int
    query_len: int
    pages: int
    full: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.query_len

    def __str__(self) -> str:
        return f"{self.kind}[{self.rows}x{self.query_len}, {self.pages} pages{', full' if self.full else ''}]"
