"""The target against Hugging Face transformers, float32, every parameter random."""

import pytest
import torch

from dsv4.api import forward
from dsv4.ops.table import PLAIN
from tests.support.models import hf_model, memory_params, tiny_config, tiny_weights

CONFIGS = {
    "real ratios and window, 300 tokens": ({}, 300),
    "few entries, all selected": ({"index_topk": 512}, 70),
    "more entries than top-k, 32 index heads": ({"index_n_heads": 32, "index_topk": 6}, 160),
    "window shorter than the prompt": ({"sliding_window": 24}, 140),
    "all layers hash routed": ({"num_hash_layers": 5}, 66),
    "no hash layer, three experts a token": ({"num_hash_layers": 0, "num_experts_per_tok": 3}, 66),
    "two streams, one group": ({"hc_mult": 2, "o_groups": 1}, 66),
    "window-only": ({"num_hidden_layers": 2, "compress_ratios": (0, 0), "dspark_target_layer_ids": ()}, 150),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    overrides, length = CONFIGS[name]
    cfg = tiny_config(**overrides)
    weights = tiny_weights(cfg, seed=len(name))
    ids = torch.randint(0, cfg.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = hf_model(cfg, weights)(ids[None]).logits[0]
    got = forward(cfg, memory_params(cfg, weights), ids, ops=PLAIN).logits
    assert expected.std() > 0.5
    assert (got - expected).abs().max() < 1e-4
