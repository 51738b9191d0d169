"""Tiny models for tests: configs, in-memory parameters, and the same weights inside Hugging Face transformers."""

import re
from dataclasses import fields

import torch
from torch import Tensor

from dsv4.checkpoint.formats import quantize_int8
from dsv4.checkpoint.random import random_weights
from dsv4.config import ModelConfig
from dsv4.mesh import SINGLE
from dsv4.model.rope import rope_tables
from dsv4.params import Params, build_drafter, build_target
from dsv4.tree import QuantWeight

BASE = {
    "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 5, "num_hash_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "sliding_window": 128,
    "compress_ratios": (0, 0, 4, 128, 4, 0, 0, 0), "index_n_heads": 16, "index_head_dim": 16, "index_topk": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 4096, "dspark_block_size": 5,
    "dspark_noise_token_id": 150, "dspark_target_layer_ids": (2, 3, 4), "dspark_markov_rank": 16, "quant_format": "none",
}  # fmt: skip


def tiny_config(**overrides) -> ModelConfig:
    return ModelConfig(**(BASE | overrides)).validate()


class MemoryReader:
    """`dsv4.params.Reader` over a dict of float tensors."""

    def __init__(self, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.weights, self.dtype = weights, dtype

    def __call__(self, names, form, *, rows=slice(None), cols=slice(None)) -> Tensor:
        names = [names] if isinstance(names, str) else list(names)
        slices = [rows] * len(names) if isinstance(rows, slice) else list(rows)
        parts = [self.weights[n][r] for n, r in zip(names, slices, strict=True)]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        whole = whole[:, cols] if cols != slice(None) else whole
        dtype = {"f32": torch.float32, "i32": torch.int32}.get(form, self.dtype)
        return whole.to(dtype).contiguous()

    def stack(self, names, form) -> Tensor:
        return torch.stack([self(group, form) for group in names])


def memory_params(
    cfg: ModelConfig, weights: dict[str, Tensor], *, dtype=torch.float32, drafter=False, positions=2048, mesh=SINGLE
) -> Params:
    read = MemoryReader(weights, dtype)
    return Params(
        target=build_target(cfg, read, mesh),
        drafter=build_drafter(cfg, read, mesh) if drafter else None,
        rope=rope_tables(cfg, positions, dtype),
    )


def tiny_weights(cfg: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    return dict(random_weights(cfg, seed))


_RENAMES = [
    (r"^head\.", "lm_head."), (r"^embed\.", "model.embed_tokens."), (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"), (r"^layers\.", "model.layers."),
    (r"\.hc_attn_", ".attn_hc."), (r"\.hc_ffn_", ".ffn_hc."), (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.attn_sink", ".sinks"), (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."), (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj", ".self_attn.compressor.indexer.scorer.weights_proj"),
    (r"\.self_attn\.indexer\.wq_b", ".self_attn.compressor.indexer.q_b_proj"),
    (r"(compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."), (r"\.ape", ".position_bias"),
    (r"\.q_norm\.", ".q_a_norm."), (r"\.wq_a\.", ".q_a_proj."), (r"\.wq_b\.", ".q_b_proj."), (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."), (r"\.wo_a\.", ".o_a_proj."), (r"\.wo_b\.", ".o_b_proj."),
    (r"\.gate\.bias", ".gate.e_score_correction_bias"), (r"shared_experts\.w1", "shared_experts.gate_proj"),
    (r"shared_experts\.w2", "shared_experts.down_proj"), (r"shared_experts\.w3", "shared_experts.up_proj"),
]  # fmt: skip


def hf_model(cfg: ModelConfig, weights: dict[str, Tensor]):
    """transformers' DeepseekV4ForCausalLM with exactly these weights, float32, eager attention."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    shared = {f.name for f in fields(ModelConfig)} - {"rope_scaling", "quant_format", "compress_ratios"}
    raw = {n: getattr(cfg, n) for n in shared if not n.startswith("dspark")}
    s = cfg.rope_scaling
    scaling = {
        "type": "yarn", "factor": s.factor, "beta_fast": s.beta_fast, "beta_slow": s.beta_slow,
        "original_max_position_embeddings": s.original_max_position_embeddings,
    }  # fmt: skip
    config = DeepseekV4Config(
        **raw, compress_ratios=list(cfg.compress_ratios[: cfg.num_hidden_layers]), rope_scaling=scaling
    )
    config._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).float().eval()
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.startswith("mtp.") or ".experts." in name:
            continue
        for pattern, target in _RENAMES:
            name = re.sub(pattern, target, name)
        state[name] = value
    for i in range(cfg.num_hidden_layers):
        stem = f"layers.{i}.ffn.experts."
        w = [[weights[f"{stem}{e}.w{n}.weight"] for e in range(cfg.n_routed_experts)] for n in (1, 2, 3)]
        state[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat([a, b]) for a, b in zip(w[0], w[2], strict=True)]
        )
        state[f"model.layers.{i}.mlp.experts.down_proj"] = torch.stack(w[1])
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if "inv_freq" not in name]
    assert not missing and not unexpected, (missing, unexpected)
    return model


def quantised(cfg: ModelConfig, weights: dict[str, Tensor], *, drafter=False, positions=2048, mesh=SINGLE) -> Params:
    """The same weights as W8A8: int8 sites quantised per output channel, everything else bf16."""
    return Params(
        target=build_target(cfg, QuantReader(weights), mesh),
        drafter=build_drafter(cfg, QuantReader(weights), mesh) if drafter else None,
        rope=rope_tables(cfg, positions, torch.bfloat16),
    )


class QuantReader(MemoryReader):
    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__(weights, torch.bfloat16)

    def _int8(self, w: Tensor) -> QuantWeight:
        values, scale = quantize_int8(w.flatten(0, -2).float())
        return QuantWeight(values=values.view(w.shape), scale=scale.view(w.shape[:-1]))

    def __call__(self, names, form, **where):
        if form == "int8":
            return self._int8(super().__call__(names, "f32", **where))
        return super().__call__(names, form, **where)

    def stack(self, names, form):
        return self._int8(torch.stack([MemoryReader.__call__(self, group, "f32") for group in names]))
