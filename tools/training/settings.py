"""What the demo model is and how it is trained: every number of the recipe, in one place."""

from dataclasses import asdict, dataclass
from typing import Any

from dsv4.checkpoint.tiny import tiny_config
from dsv4.config import ModelConfig, config_from_dict

DRAFTS = 7  # rows of a draft block, in training and in serving


def demo_config() -> dict[str, Any]:
    """config.json of the demo: six layers of all kinds (SWA, SWA, CSA, HCA, CSA, HCA), eight experts, three draft stages."""
    return tiny_config(
        vocab_size=2048, hidden_size=128, num_hidden_layers=6, num_hash_layers=2, num_attention_heads=4, head_dim=64,
        qk_rope_head_dim=32, q_lora_rank=64, o_lora_rank=64, o_groups=2, index_n_heads=16, index_head_dim=32,
        index_topk=64, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
        max_position_embeddings=8192, dspark_block_size=DRAFTS, dspark_markov_rank=64,
    )  # fmt: skip


def model_config() -> ModelConfig:
    return config_from_dict(demo_config())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`*_steps` are optimiser steps; a step sees rows x length tokens.

    The target's learning rate is level for `plain_fraction` of its steps, then declines to zero, on longer sequences, with
    quantisation and the indexer's selection simulated. The drafter trains against that form throughout: `drafter_stop` steps
    on corpus and `rollouts`, then `tune_steps` on `tune_rollouts` others with the target's distribution at `temperature`, since decoding is
    greedy.
    """

    seed: int = 0
    target_steps: int = 2200
    target_rows: int = 8
    target_length: int = 256
    long_length: int = 512
    plain_fraction: float = 0.7
    target_lr: float = 3e-3
    index_weight: float = 0.05
    bias_speed: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    drafter_steps: int = 2000
    drafter_rows: int = 4
    anchors: int = 48
    drafter_lr: float = 3e-3
    corpus_fraction: float = 0.25
    gamma: float = 4.0
    drafter_level: float = 0.5
    drafter_stop: int = 1500
    tune_steps: int = 3000
    tune_lr: float = 2e-3
    temperature: float = 0.3
    rollouts: int = 2048
    tune_rollouts: int = 4096
    rollout_length: int = 512
    held_out: float = 0.05

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
