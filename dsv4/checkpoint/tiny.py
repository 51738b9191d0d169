"""Small random checkpoints in the released source format: all layer kinds, three draft stages, a tokenizer."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dsv4.checkpoint.files import write_atomic
from dsv4.checkpoint.manifest import Totals
from dsv4.checkpoint.random import random_weights
from dsv4.checkpoint.source import write_source
from dsv4.checkpoint.vocabulary import ENCODING_CONSTANTS, TOKENIZER_CONFIG, noise_token_id, train_tokenizer
from dsv4.config import config_from_dict
from dsv4.errors import ConfigError

STAGES = 3
# The release's config.json, in its key order, at sizes a laptop test can afford.
TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 7,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 4,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0, 0, 0],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 8192,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 512,
    },
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "dspark_block_size": 5,
    "dspark_noise_token_id": 2041,
    "dspark_target_layer_ids": [4, 5, 6],
    "dspark_markov_rank": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
}


def tiny_config(**sizes: Any) -> dict[str, Any]:
    """A small config.json as a dictionary; `sizes` are its keys.

    What depends on a given size follows it unless given too: the schedule of layer kinds and the drafter's taps on the
    number of layers (the release's pattern), the noise token on the vocabulary.

    Raises: ConfigError for a key that config.json does not have.
    """
    unknown = sizes.keys() - TINY.keys()
    if unknown:
        raise ConfigError(f"{', '.join(sorted(unknown))}: not in config.json; its keys are {', '.join(TINY)}")
    raw = json.loads(json.dumps(TINY)) | sizes
    layers, vocab_size = raw["num_hidden_layers"], raw["vocab_size"]
    pattern = [0, 0, *((4, 128) * layers)][:layers]
    derived = {
        "num_hash_layers": min(raw["num_hash_layers"], layers),
        "compress_ratios": pattern + [0] * STAGES,
        "dspark_target_layer_ids": [max(0, layers - STAGES + i) for i in range(STAGES)],
        "dspark_noise_token_id": noise_token_id(vocab_size),
    }
    return raw | {name: value for name, value in derived.items() if name not in sizes}


def write_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json, tokenizer_config.json and encoding/, as files beside the weights."""
    write_atomic(out / "tokenizer.json", tokenizer.to_str(pretty=False))
    write_atomic(out / "tokenizer_config.json", json.dumps(TOKENIZER_CONFIG, indent=2, ensure_ascii=False))
    (out / "encoding").mkdir(exist_ok=True)
    write_atomic(out / "encoding" / "encoding_dsv4.py", ENCODING_CONSTANTS)


def make_tiny(out: str | Path, *, seed: int = 0, raw: dict[str, Any] | None = None) -> Totals:
    """A random checkpoint in source format; the same seed and config give the same bytes.

    raw: a config.json as a dictionary; `tiny_config()` by default.
    """
    out, raw = Path(out), raw or tiny_config()
    cfg = config_from_dict(raw)
    tokenizer = train_tokenizer(cfg.vocab_size)  # first: it refuses a vocabulary that is too small
    size = write_source(out, raw, random_weights(cfg, seed))
    write_tokenizer(out, tokenizer)
    return size
