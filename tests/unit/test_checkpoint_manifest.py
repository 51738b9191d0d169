"""The manifest against the published totals and the shape of the release."""

import dataclasses
import json
from pathlib import Path

import pytest

from dsv4.checkpoint.manifest import manifest, shard_name, stored, totals, weights
from dsv4.checkpoint.source import dump_config
from dsv4.checkpoint.tiny import tiny_config
from dsv4.config import ModelConfig, config_from_dict, load_config
from dsv4.errors import ConfigError

REAL = Path(__file__).parents[2] / "configs" / "model" / "deepseek-v4-flash-dspark.json"


@pytest.fixture(scope="module")
def cfg() -> ModelConfig:
    return load_config(REAL)


def test_source_totals_are_the_published_ones(cfg: ModelConfig) -> None:
    size = totals(manifest(cfg, "source").values())
    assert (size.tensors, size.nbytes) == (72_317, 166_878_536_440)


def test_w8a8_totals_are_the_published_ones(cfg: ModelConfig) -> None:
    size = totals(manifest(cfg, "w8a8").values())
    assert (size.tensors, size.nbytes) == (72_178, 308_071_597_048)
    assert sum(weight.int8 for weight in weights(cfg)) == 35_579


@pytest.mark.parametrize(
    ("form", "count", "nbytes"), [("source", 69_187, 159_609_485_896), ("w8a8", 69_055, 294_615_637_576)]
)
def test_the_preview_with_classic_mtp_has_its_published_totals(
    cfg: ModelConfig, form: str, count: int, nbytes: int
) -> None:
    preview = dataclasses.replace(cfg, compress_ratios=cfg.compress_ratios[:44], dspark_target_layer_ids=())
    size = totals(manifest(preview, form).values())
    assert (size.tensors, size.nbytes) == (count, nbytes)


def test_one_block_of_each_kind_has_its_published_tensor_count(cfg: ModelConfig) -> None:
    names = manifest(cfg, "source")

    def count(prefix: str) -> int:
        return sum(name.startswith(prefix) for name in names)

    prefixes = ["layers.0.", "layers.3.", "layers.4.", "mtp.0.", "mtp.1.", "mtp.2."]
    assert [count(prefix) for prefix in prefixes] == [1565, 1569, 1576, 1568, 1565, 1572]


def test_shards_are_laid_out_as_released(cfg: ModelConfig) -> None:
    where = {name: shard_name(cfg, name) for name in manifest(cfg, "source")}
    assert len(set(where.values())) == 48
    assert where["embed.weight"] == "model-00001-of-00048.safetensors"
    assert where["layers.42.ffn.gate.bias"] == "model-00044-of-00048.safetensors"
    assert where["head.weight"] == where["hc_head_fn"] == "model-00045-of-00048.safetensors"
    assert where["mtp.2.norm.weight"] == "model-00048-of-00048.safetensors"


def test_config_text_is_laid_out_as_released() -> None:
    raw = json.loads(REAL.read_text())
    text = dump_config(raw)
    assert json.loads(text) == raw
    assert len(text.encode()) == 1888  # the published size of config.json
    assert '\n  "dspark_target_layer_ids": [40, 41, 42],\n' in text


def test_kinds_do_not_carry_layer_or_expert_numbers(cfg: ModelConfig) -> None:
    kinds = {weight.kind for weight in weights(cfg)}
    assert {"ffn.experts.w1", "attn.indexer.wq_b", "markov_head.markov_w2", "embed"} <= kinds
    assert len(kinds) == 46


def test_mxfp4_refuses_columns_it_cannot_group() -> None:
    ragged = config_from_dict(tiny_config(hidden_size=272, moe_intermediate_size=40))
    with pytest.raises(ConfigError, match="MXFP4 needs a multiple of 32"):
        manifest(ragged, "source")


def test_ragged_tiles_round_up() -> None:
    (wq_a,) = (
        w for w in weights(config_from_dict(tiny_config(q_lora_rank=136))) if w.name == "layers.0.attn.wq_a.weight"
    )
    assert [str(spec) for spec in stored(wq_a, "source")] == ["F8_E4M3 [136, 256]", "F8_E8M0 [2, 2]"]
