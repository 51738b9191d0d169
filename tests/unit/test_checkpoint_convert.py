"""Conversion against an independent float64 decode, and what happens when it is interrupted at any point."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.checkpoint import convert as module
from dsv4.checkpoint.check import check
from dsv4.checkpoint.convert import convert
from dsv4.checkpoint.files import ShardWriter
from dsv4.checkpoint.folder import INDEX
from dsv4.checkpoint.journal import JOURNAL
from dsv4.checkpoint.load import load_params
from dsv4.checkpoint.manifest import manifest, weights
from dsv4.checkpoint.plan import plan_conversion
from dsv4.checkpoint.quantise import RoundingError
from dsv4.checkpoint.tiny import make_tiny, tiny_config
from dsv4.config import load_config
from dsv4.errors import CheckpointError
from dsv4.tree import QuantWeight
from tests.unit.test_checkpoint_formats import reference_fp8, reference_mxfp4

# Ragged FP8 tiles, one layer of each kind.
RAW = tiny_config(
    vocab_size=272, num_hidden_layers=4, hidden_size=160, q_lora_rank=72, head_dim=32, n_routed_experts=3,
    num_experts_per_tok=2, moe_intermediate_size=32, num_attention_heads=4, o_lora_rank=24, dspark_markov_rank=16,
)  # fmt: skip


def run(source: Path, out: Path, **options) -> dict[str, RoundingError]:
    return convert(plan_conversion(source), out, **options)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for shard in sorted(folder.glob("*.safetensors")) for name, t in load_file(shard).items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != JOURNAL
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "source"
    make_tiny(out, seed=5, raw=RAW)
    shard = out / "model-00002-of-00009.safetensors"
    tensors = load_file(shard)  # rows that the quantiser must not divide by
    tensors["layers.0.attn.wq_b.weight"].view(torch.uint8)[3] = 0
    tensors["layers.0.ffn.experts.0.w1.scale"].view(torch.uint8)[4] = 100
    save_file(tensors, shard)
    (out / "inference").mkdir()
    (out / "inference" / "config.json").write_text('{"n_mtp_layers": 3}')
    return out


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("w8a8") / "out"
    run(source, out, jobs=2)
    return out


def decode64(tensors: dict[str, torch.Tensor], name: str, encoding: str) -> np.ndarray:
    values = tensors[name].view(torch.uint8)
    scale = tensors[name.removesuffix("weight") + "scale"].view(torch.uint8)
    return (reference_fp8 if encoding == "fp8" else reference_mxfp4)(values, scale)


def test_every_weight_is_within_half_a_step_of_a_float64_decode(source: Path, converted: Path) -> None:
    before, after = tensors_of(source), tensors_of(converted)
    for weight in weights(load_config(source)):
        name, got = weight.name, after[weight.name]
        if weight.encoding not in ("fp8", "mxfp4"):
            assert torch.equal(got.view(torch.uint8), before[name].view(torch.uint8)), name
            continue
        want = decode64(before, name, weight.encoding)
        if not weight.int8:
            assert got.dtype == torch.bfloat16 and torch.equal(got, torch.from_numpy(want).bfloat16()), name
            continue
        scale = after[weight.scale_name]
        amax = np.maximum(np.abs(want).max(1).astype(np.float32), np.float32(1e-4))
        assert np.array_equal(scale.numpy(), amax / np.float32(127)), name
        assert got.dtype == torch.int8 and got.min() >= -127, name
        steps = want / scale.double().numpy()[:, None]
        assert np.abs(got.numpy() - steps).max() <= 0.5 + 1e-5, name
        assert np.array_equal(got.numpy(), np.rint(want.astype(np.float32) / scale.numpy()[:, None])), name


def test_zero_and_tiny_rows_keep_the_floor(converted: Path) -> None:
    after = tensors_of(converted)
    floor = np.float32(1e-4) / np.float32(127)
    assert after["layers.0.attn.wq_b.scale"][3] == floor
    assert not after["layers.0.attn.wq_b.weight"][3].any()
    assert after["layers.0.ffn.experts.0.w1.scale"][4] == floor


def test_names_dtypes_and_shapes_are_those_of_the_manifest(source: Path, converted: Path) -> None:
    want = manifest(load_config(converted), "w8a8")
    got = tensors_of(converted)
    assert got.keys() == want.keys()
    assert {name.split(".")[1] for name in got if name.startswith("mtp.")} == {"0", "1", "2"}
    assert all(tuple(got[name].shape) == spec.shape for name, spec in want.items())
    index = json.loads((converted / INDEX).read_text())
    assert index["weight_map"].keys() == want.keys()
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in want.values())
    assert check(converted).problems == [] and check(source).problems == []


def test_the_config_changes_in_its_quantisation_only(source: Path, converted: Path) -> None:
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, converted))
    quantization = after["quantization_config"]
    assert list(before) == list(after)
    assert {name for name in before if before[name] != after[name]} == {"quantization_config"}
    assert quantization["quant_method"] == "compressed-tensors" and quantization["format"] == "int-quantized"
    ignore = set(quantization["ignore"])
    assert {"layers.0.attn.wq_a", "layers.2.attn.indexer.compressor.wkv", "mtp.0.main_proj", "head"} <= ignore
    assert {"mtp.2.markov_head.markov_w1", "layers.3.attn.compressor.wgate"} <= ignore
    assert not any("wq_b" in name or "experts" in name for name in ignore)
    assert load_config(converted).quant_format == "w8a8"


def test_files_beside_the_weights_come_along(source: Path, converted: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "encoding/encoding_dsv4.py", "inference/config.json"):
        assert (converted / name).read_bytes() == (source / name).read_bytes()


def test_loaded_as_stored_and_as_float(source: Path, converted: Path) -> None:
    cfg = load_config(converted)
    stored = load_params(converted, cfg, max_positions=16)
    floats = load_params(converted, cfg, torch.float32, max_positions=16)
    experts = stored.target.layers[2].experts.w13
    assert isinstance(experts, QuantWeight) and experts.shape == (4, 64, 160)
    decoded = experts.values.float() * experts.scale.unsqueeze(-1)
    assert torch.equal(decoded, floats.target.layers[2].experts.w13)
    assert stored.target.embed.dtype == torch.bfloat16 and stored.target.layers[0].router.gate.dtype == torch.float32
    assert stored.drafter is not None and load_params(converted, cfg, drafter=False, max_positions=16).drafter is None


def test_the_report_counts_rows_and_errors(source: Path, tmp_path: Path) -> None:
    report = run(source, tmp_path / "out")
    assert report["attn.wq_b"].zero_rows == 1 and report["ffn.experts.w1"].floored_rows == 1
    assert all(account.saturated_rows == 0 for account in report.values())
    assert report["attn.wq_a"].max_error == 0  # e4m3 times a power of two fits bf16
    experts = report["ffn.experts.w2"]
    assert experts.matrices == 7 * 3 and experts.values == 21 * 160 * 32
    assert 0 < experts.rms_error < experts.max_error and 0.002 < experts.relative_rms_error < 0.02


def test_jobs_change_nothing(source: Path, converted: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "one", jobs=1)
    assert files_of(tmp_path / "one") == files_of(converted)


def test_progress_adds_up_to_the_source(source: Path, tmp_path: Path) -> None:
    done: list[int] = []
    run(source, tmp_path / "out", jobs=2, progress=done.append)
    assert sum(done) == plan_conversion(source).source_totals.nbytes


class DiskFull:
    """Lets `allowed` writes through, then reports a full disk, as the kernel does."""

    def __init__(self, allowed: int) -> None:
        self.allowed, self.write = allowed, ShardWriter.write_pieces

    def __call__(self, writer: ShardWriter, name: str, pieces) -> None:
        self.allowed -= 1
        if self.allowed < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(writer, name, pieces)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_full_disk_is_named_and_resume_finishes(
    source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    out, full = tmp_path / "out", DiskFull(100)
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write_pieces", lambda *args: full(*args))
        with pytest.raises(CheckpointError, match=r"no space left .* run the same command with --resume"):
            run(source, out, jobs=jobs)
    finished = sorted(out.glob("*.safetensors"))
    assert finished and len(finished) < 9
    assert not (out / "config.json").exists() and not list(out.glob(".*.tmp"))
    with pytest.raises(CheckpointError, match="an unfinished conversion"):
        check(out)
    stamps = {path: path.stat().st_mtime_ns for path in finished}
    report = run(source, out, resume=True)
    assert files_of(out) == files_of(converted)
    assert {path: path.stat().st_mtime_ns for path in finished} == stamps
    assert report["ffn.experts.w1"].matrices == 21


def test_too_little_space_is_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="the disk has 1,000; make room first"):
        run(source, tmp_path / "out")
    monkeypatch.undo()
    run(source, tmp_path / "out", resume=True)


def test_resume_repeats_what_was_damaged_or_changed(copy: Path, tmp_path: Path, converted: Path) -> None:
    out = tmp_path / "out"
    run(copy, out)
    kept = out / "model-00004-of-00009.safetensors"
    stamp = kept.stat().st_mtime_ns
    lost, cut = out / "model-00001-of-00009.safetensors", out / "model-00002-of-00009.safetensors"
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    changed = copy / "model-00003-of-00009.safetensors"
    tensors = load_file(changed)
    tensors["layers.1.attn.attn_sink"] += 1
    save_file(tensors, changed)
    (out / ".half.safetensors.tmp").write_bytes(b"left by a kill")
    run(copy, out, resume=True)
    assert kept.stat().st_mtime_ns == stamp
    assert check(out).problems == [] and not (out / ".half.safetensors.tmp").exists()
    before, after = tensors_of(converted), tensors_of(out)
    assert torch.equal(after["layers.1.attn.attn_sink"], before["layers.1.attn.attn_sink"] + 1)
    assert torch.equal(after["embed.weight"], before["embed.weight"])


def test_resume_reads_headers_only(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(source, tmp_path / "out")
    monkeypatch.setattr("dsv4.checkpoint.files.Shard.pieces", lambda *args: pytest.fail("read a tensor"))
    run(source, tmp_path / "out", resume=True)


def test_a_folder_in_use_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="already exists and is not empty"):
            run(source, tmp_path / "used", resume=resume)
    run(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already holds a conversion; add --resume"):
        run(source, tmp_path / "out")
    with module._claimed(tmp_path / "out"), pytest.raises(CheckpointError, match="another conversion is writing here"):
        run(source, tmp_path / "out", resume=True)
    for inside in (source, source / "out"):
        with pytest.raises(CheckpointError, match="inside the source checkpoint"):
            run(source, inside)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="File exists"):
        run(source, tmp_path / "file")


def test_resume_from_another_source_is_refused(source: Path, copy: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    config = json.loads((copy / "config.json").read_text()) | {"rope_theta": 20000}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"was begun from another config\.json"):
        run(copy, tmp_path / "out", resume=True)
    (tmp_path / "out" / JOURNAL).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        run(source, tmp_path / "out", resume=True)


def edit(folder: Path, number: int, name: str, change) -> None:
    file = folder / f"model-{number:05d}-of-00009.safetensors"
    tensors = load_file(file)
    change(tensors[name].view(torch.uint8))
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("name", "byte", "message"),
    [
        ("layers.0.ffn.experts.1.w1.scale", 0xFF, r"layers\.0\.ffn\.experts\.1\.w1\.scale: 1 of .* are 0xFF"),
        ("layers.0.attn.wq_b.scale", 0xFF, r"layers\.0\.attn\.wq_b\.scale: 1 of .* are 0xFF"),
        ("layers.0.attn.wq_b.scale", 254, r"layers\.0\.attn\.wq_b\.weight: \d+ rows hold NaN or values beyond"),
        ("layers.0.attn.wq_b.weight", 0x7F, r"layers\.0\.attn\.wq_b\.weight: 1 rows hold NaN"),
        ("layers.0.attn.wq_a.weight", 0xFF, r"layers\.0\.attn\.wq_a\.weight: 1 rows hold NaN"),
    ],
)
def test_damaged_values_are_refused_by_name(copy: Path, tmp_path: Path, name: str, byte: int, message: str) -> None:
    edit(copy, 2, name, lambda raw: raw.view(-1)[:1].fill_(byte))
    with pytest.raises(CheckpointError, match=message):
        run(copy, tmp_path / "out")
    assert not (tmp_path / "out" / "model-00002-of-00009.safetensors").exists()


@pytest.mark.parametrize("byte", [0, 110, 127])
def test_scales_at_the_edges_stay_finite(copy: Path, tmp_path: Path, byte: int) -> None:
    edit(copy, 2, "layers.0.ffn.experts.1.w1.scale", lambda raw: raw.fill_(byte))
    run(copy, tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    want = decode64(tensors_of(copy), "layers.0.ffn.experts.1.w1.weight", "mxfp4")
    scale = after["layers.0.ffn.experts.1.w1.scale"].double().numpy()[:, None]
    assert np.isfinite(scale).all() and (scale > 0).all()
    assert (np.abs(after["layers.0.ffn.experts.1.w1.weight"].numpy() * scale - want) <= scale * 0.50001).all()


def test_only_the_source_format_converts(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already W8A8"):
        plan_conversion(converted)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(CheckpointError, match="only --dry-run works from config"):
        run(tmp_path, tmp_path / "out")
    quantization = RAW["quantization_config"] | {"weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"quantization_config": quantization}))
    with pytest.raises(CheckpointError, match=r"weight_block_size is \[32, 32\]"):
        plan_conversion(tmp_path)


def test_a_scale_in_another_shard_is_found(copy: Path, converted: Path, tmp_path: Path) -> None:
    first, second = (copy / f"model-0000{n}-of-00009.safetensors" for n in (2, 3))
    name, here, there = "layers.0.attn.wq_b.scale", load_file(first), load_file(second)
    there[name] = here.pop(name)
    save_file(here, first)
    save_file(there, second)
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"][name] = second.name
    (copy / INDEX).write_text(json.dumps(index))
    run(copy, tmp_path / "out")
    assert torch.equal(tensors_of(tmp_path / "out")[name], tensors_of(converted)[name])
