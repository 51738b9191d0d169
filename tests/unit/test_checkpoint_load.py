"""Loading: trees from files, from shapes and from a seed agree; folders that differ from the manifest are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.checkpoint.folder import INDEX
from dsv4.checkpoint.formats import decode_e8m0, decode_fp8, decode_mxfp4
from dsv4.checkpoint.load import abstract_params, load_params, random_params
from dsv4.checkpoint.random import random_weights
from dsv4.checkpoint.source import write_source
from dsv4.checkpoint.tiny import make_tiny, tiny_config
from dsv4.config import ModelConfig, config_from_dict, load_config
from dsv4.errors import CheckpointError, ConfigError
from dsv4.mesh import Mesh
from dsv4.tree import QuantWeight, mismatches, named_leaves

RAW = tiny_config(
    vocab_size=320, num_hidden_layers=5, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
)
POSITIONS = 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "source"
    make_tiny(out, seed=1, raw=RAW)
    return out


@pytest.fixture
def damaged(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "damaged")
    return tmp_path / "damaged"


@pytest.fixture(scope="module")
def cfg() -> ModelConfig:
    return config_from_dict(RAW)


def shard(path: Path, number: int) -> Path:
    return path / f"model-{number:05d}-of-00010.safetensors"


def load(path: Path, **options):
    return load_params(path, load_config(path), torch.float32, max_positions=POSITIONS, **options)


def test_the_same_seed_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "again", seed=1, raw=RAW)
    make_tiny(tmp_path / "other", seed=2, raw=RAW)
    for file in sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file()):
        assert (tmp_path / "again" / file).read_bytes() == (source / file).read_bytes(), file
    assert shard(tmp_path / "other", 2).read_bytes() != shard(source, 2).read_bytes()


def test_a_tiny_checkpoint_holds_no_neutral_parameter(cfg: ModelConfig) -> None:
    for name, values in random_weights(cfg, 0):
        flat = values.double().flatten()
        assert len(flat) == 1 or flat.std() > 0.01, name
        assert flat.abs().max() < 30 or "tid2eid" in name, name
        assert "tid2eid" in name or not bool(((flat == 0) | (flat == 1)).any()), name


def test_the_shards_open_with_the_safetensors_library(source: Path) -> None:
    tensors = load_file(shard(source, 2))
    assert tensors["layers.0.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
    assert tensors["layers.0.attn.wq_a.scale"].dtype == torch.float8_e8m0fnu
    assert tensors["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    assert tensors["layers.0.ffn.gate.tid2eid"].dtype == torch.int64


def test_float_leaves_are_the_decoded_tensors(source: Path) -> None:
    params, tensors = load(source), load_file(shard(source, 4))  # layer 2: CSA

    def fp8(stem: str) -> torch.Tensor:
        scale = decode_e8m0(tensors[f"{stem}.scale"].view(torch.uint8), stem)
        return decode_fp8(tensors[f"{stem}.weight"].view(torch.uint8), scale)

    def fp4(stem: str) -> torch.Tensor:
        scale = decode_e8m0(tensors[f"{stem}.scale"].view(torch.uint8), stem)
        return decode_mxfp4(tensors[f"{stem}.weight"].view(torch.uint8), scale)

    layer, at = params.target.layers[2], "layers.2.attn."
    assert torch.equal(layer.attn.wq_b, torch.cat([fp8(at + "wq_b"), fp8(at + "indexer.wq_b")]))
    plain = ["compressor.wkv", "compressor.wgate", "indexer.compressor.wkv", "indexer.compressor.wgate"]
    bf16 = [tensors[f"{at}{name}.weight"].float() for name in [*plain, "indexer.weights_proj"]]
    assert torch.equal(layer.attn.w_in, torch.cat([fp8(at + "wq_a"), fp8(at + "wkv"), *bf16]))
    stem = "layers.2.ffn.experts.3."
    assert torch.equal(layer.experts.w13[3], torch.cat([fp4(stem + "w1"), fp4(stem + "w3")]))
    assert torch.equal(layer.experts.w2[-1], fp8("layers.2.ffn.shared_experts.w2"))
    assert torch.equal(layer.attn.sink, tensors[at + "attn_sink"])
    assert params.target.layers[0].router.tid2eid.dtype == torch.int32


def test_abstract_random_and_loaded_trees_have_the_same_leaves(source: Path, cfg: ModelConfig) -> None:
    options = {"max_positions": POSITIONS}
    abstract = abstract_params(cfg, dtype=torch.float32, **options)
    assert all(leaf.is_meta for _, leaf in named_leaves(abstract))
    assert mismatches(abstract, load(source)) == []
    assert mismatches(abstract, random_params(cfg, dtype=torch.float32, **options)) == []
    quantised = abstract_params(cfg, **options)
    assert isinstance(quantised.target.layers[0].experts.w13, QuantWeight)
    assert mismatches(quantised, random_params(cfg, **options)) == []
    assert mismatches(abstract, random_params(cfg, **options))


def test_ranks_read_slices_that_make_up_the_whole(source: Path, cfg: ModelConfig) -> None:
    whole = load(source).target.layers[3]
    mesh = [Mesh(dp=2, tp=2, ep=4, rank=rank) for rank in range(4)]
    parts = [load(source, mesh=m, drafter=False).target for m in mesh]
    layers = [part.layers[3] for part in parts]
    assert torch.equal(torch.cat([p.attn.wq_b for p in layers[:2]]), whole.attn.wq_b)
    assert torch.equal(torch.cat([p.attn.wo_a for p in layers[2:]]), whole.attn.wo_a)
    assert torch.equal(torch.cat([p.attn.wo_b for p in layers[:2]], 1), whole.attn.wo_b)
    assert torch.equal(torch.cat([p.experts.w2[:-1] for p in layers]), whole.experts.w2[:-1])
    assert torch.equal(torch.cat([part.head for part in parts[:2]]), load(source).target.head)
    seeded = [random_params(cfg, mesh=m, drafter=False, max_positions=POSITIONS) for m in mesh[:2]]
    one = random_params(cfg, drafter=False, max_positions=POSITIONS)
    wo_b = [p.target.layers[3].attn.wo_b for p in seeded]
    assert torch.equal(torch.cat([w.values for w in wo_b], 1), one.target.layers[3].attn.wo_b.values)
    assert torch.equal(wo_b[0].scale, one.target.layers[3].attn.wo_b.scale)


def test_without_a_drafter_no_draft_shard_is_needed(damaged: Path) -> None:
    for number in (8, 9, 10):
        shard(damaged, number).unlink()
    assert load(damaged, drafter=False).drafter is None
    with pytest.raises(CheckpointError, match=r"model-00008-of-00010\.safetensors: missing"):
        load(damaged)


def test_source_without_a_dtype_is_sent_to_convert(source: Path, cfg: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match=r'released source format .* "dsv4 convert'):
        load_params(source, cfg)


def test_an_integer_dtype_is_refused(source: Path, cfg: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"torch\.int8; expected None .* or a float dtype"):
        load_params(source, cfg, torch.int8)


def test_a_drafter_is_refused_where_there_is_none(source: Path) -> None:
    bare = config_from_dict(RAW | {"compress_ratios": RAW["compress_ratios"][:6], "dspark_target_layer_ids": None})
    with pytest.raises(CheckpointError, match="no DSpark drafter; use K=0"):
        load_params(source, bare, torch.float32, drafter=True)


def test_a_truncated_shard_is_named_with_both_sizes(damaged: Path) -> None:
    file = shard(damaged, 3)
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 1)
    with pytest.raises(CheckpointError, match=rf"{file.name}: truncated: {size - 1:,} bytes, .* {size:,}"):
        load(damaged)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x04" + bytes(7) + b"[1,]"])
def test_a_file_that_is_no_safetensors_is_refused(damaged: Path, content: bytes) -> None:
    shard(damaged, 3).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{shard(damaged, 3).name}: (not a safetensors file|damaged)"):
        load(damaged)


def test_missing_and_extra_tensors_are_both_named(damaged: Path) -> None:
    index = json.loads((damaged / INDEX).read_text())
    index["weight_map"]["layers.0.attn.q_norm.scale"] = index["weight_map"].pop("layers.1.attn.wkv.scale")
    (damaged / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load(damaged)
    assert "layers.1.attn.wkv.scale: missing from the index" in str(caught.value)
    assert "layers.0.attn.q_norm.scale: in the index but not part of this model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_shard_that_disagrees_with_the_index_is_named(damaged: Path) -> None:
    file = shard(damaged, 1)
    save_file({"embed.weight": load_file(file)["embed.weight"], "stray": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=f"stray: in {file.name} but not part of this model"):
        load(damaged)


def test_a_wrong_dtype_says_what_was_expected(damaged: Path) -> None:
    file = shard(damaged, 1)
    save_file({"embed.weight": load_file(file)["embed.weight"].float()}, file)
    with pytest.raises(CheckpointError, match=r"embed\.weight: expected BF16 \[320, 256\], .* has F32 \[320, 256\]"):
        load(damaged)


def test_a_scale_byte_of_ff_is_refused_by_name(damaged: Path) -> None:
    file = shard(damaged, 2)
    tensors = load_file(file)
    tensors["layers.0.ffn.experts.1.w2.scale"].view(torch.uint8)[3, 1] = 255
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.experts\.1\.w2\.scale: 1 of \d+ E8M0 scales are 0xFF"):
        load(damaged)


def test_scales_of_another_converter_are_refused(damaged: Path) -> None:
    index = json.loads((damaged / INDEX).read_text())
    index["weight_map"] = {name.replace(".scale", ".weight_scale"): f for name, f in index["weight_map"].items()}
    (damaged / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"weight_scale.*convert the released checkpoint"):
        load(damaged)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", ".hidden", 7])
def test_a_shard_outside_the_folder_is_refused(damaged: Path, file: object) -> None:
    index = json.loads((damaged / INDEX).read_text())
    index["weight_map"]["embed.weight"] = file
    (damaged / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected a plain file name"):
        load(damaged)


def test_a_missing_or_broken_index_is_refused(damaged: Path) -> None:
    (damaged / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load(damaged)
    (damaged / INDEX).unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        load(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v41", "text_config": {}}, "deepseek_v41"),
        ({"vision_n_layers": 12}, "vision model is not supported"),
        ({"expert_dtype": "fp8"}, "neither the released source format"),
        ({"quantization_config": None}, "no quantization_config"),
    ],
)
def test_other_models_and_formats_are_refused(damaged: Path, change: dict, message: str) -> None:
    raw = json.loads((damaged / "config.json").read_text()) | change
    (damaged / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        load(damaged)


def test_write_source_wants_every_weight_once(tmp_path: Path, cfg: ModelConfig) -> None:
    given = dict(random_weights(cfg, 0))
    embed = given.pop("embed.weight")
    for values, message in (
        (given, "embed.weight and 0 other weights were not given"),
        (given | {"embed.weight": embed[1:]}, r"embed.weight \[319, 256\]: expected \[320, 256\]"),
        (given | {"other": embed}, "other .* expected another name"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write_source(tmp_path / "out", RAW, values.items())
        assert not list((tmp_path / "out").iterdir())


def test_a_folder_in_use_is_refused(source: Path) -> None:
    with pytest.raises(CheckpointError, match="already exists and is not empty"):
        make_tiny(source, raw=RAW)


def test_an_unknown_size_or_a_too_small_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hiden_size: not in config\.json"):
        tiny_config(hiden_size=3)
    with pytest.raises(ConfigError, match="at least 266"):
        make_tiny(tmp_path / "out", raw=tiny_config(vocab_size=200))


def test_ragged_sizes_survive_the_round_trip(tmp_path: Path) -> None:
    raw = RAW | {"hidden_size": 160, "q_lora_rank": 72, "head_dim": 48, "o_lora_rank": 40, "moe_intermediate_size": 96}
    make_tiny(tmp_path / "out", raw=raw)
    ragged = config_from_dict(raw)
    loaded, drawn = load(tmp_path / "out"), random_params(ragged, dtype=torch.float32, max_positions=POSITIONS)
    for (name, got), (_, want) in zip(named_leaves(loaded), named_leaves(drawn), strict=True):
        assert (got.float() - want.float()).norm() <= 0.13 * want.float().norm(), name  # FP4: a step of up to 1/4
