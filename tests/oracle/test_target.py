"""The target against Hugging Face transformers, float32, every parameter random."""

from dataclasses import replace

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


MUTATIONS = {
    "sink": ("layers.3.attn.attn_sink", 0.2),
    "ape": ("layers.2.attn.compressor.ape", 0.2),
    "index ape": ("layers.4.attn.indexer.compressor.ape", 3.0),
    "gate bias": ("layers.3.ffn.gate.bias", 0.5),
    "hc base": ("layers.1.hc_ffn_base", 0.1),
    "hc scale": ("layers.0.hc_attn_scale", 0.1),
    "head hc base": ("hc_head_base", 0.1),
}


def _logits(cfg, weights, ids, **changes):
    return forward(cfg, memory_params(cfg, weights), ids, ops=changes.pop("ops", PLAIN)).logits


@pytest.fixture(scope="module")
def reference():
    cfg = tiny_config()
    weights = tiny_weights(cfg, seed=11)
    ids = torch.randint(0, cfg.vocab_size, (260,), generator=torch.Generator().manual_seed(1))
    return cfg, weights, ids, _logits(cfg, weights, ids)


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_small_parameter_is_seen(name: str, reference) -> None:
    """The comparison above can fail: moving one small parameter a little moves the logits."""
    cfg, weights, ids, before = reference
    key, amount = MUTATIONS[name]
    noise = torch.randn(weights[key].shape, generator=torch.Generator().manual_seed(3)) * amount
    assert (_logits(cfg, weights | {key: weights[key] + noise}, ids) - before).abs().max() > 1e-3


def _transposed_comb(*args):
    x, post, comb = PLAIN.hc_pre(*args)
    return x, post, comb.transpose(1, 2)


def _shifted_entries(state, rows, gamma, cos_sin, eps, dtype):
    return PLAIN.compress(state, rows, gamma, cos_sin.roll(1, 0), eps, dtype)


@pytest.mark.parametrize(
    "ops",
    [
        replace(PLAIN, hc_pre=_transposed_comb),
        replace(PLAIN, compress=_shifted_entries),
        replace(PLAIN, rope=lambda x, cs, g, e, d: PLAIN.rope(x, cs.flip(-1), g, e, d)),
    ],
    ids=["comb transposed", "entries rotated at a wrong position", "cos and sin exchanged"],
)
def test_every_convention_is_seen(ops, reference) -> None:
    cfg, weights, ids, before = reference
    assert (_logits(cfg, weights, ids, ops=ops) - before).abs().max() > 1e-2


def test_yarn_is_seen(reference) -> None:
    cfg, weights, ids, before = reference
    without = replace(cfg, rope_scaling=replace(cfg.rope_scaling, factor=1.0))
    assert (_logits(without, weights, ids) - before).abs().max() > 1e-3
