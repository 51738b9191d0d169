"""`check` finds each planted fault, says where it is, and finds nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.checkpoint.check import check
from dsv4.checkpoint.convert import convert
from dsv4.checkpoint.folder import INDEX
from dsv4.checkpoint.plan import plan_conversion
from dsv4.checkpoint.tiny import make_tiny, tiny_config
from dsv4.errors import CheckpointError

RAW = tiny_config(vocab_size=272, num_hidden_layers=3, n_routed_experts=2, num_experts_per_tok=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("check")
    make_tiny(root / "source", raw=RAW)
    convert(plan_conversion(root / "source"), root / "w8a8")
    return {"source": root / "source", "w8a8": root / "w8a8"}


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def of(form: str) -> Path:
        shutil.copytree(folders[form], tmp_path / form)
        return tmp_path / form

    return of


def edit(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(file)
    change(tensors[name])
    save_file(tensors, file)


def test_sound_folders_have_no_problems(folders: dict[str, Path]) -> None:
    for form, folder in folders.items():
        result = check(folder)
        assert (result.form, result.problems) == (form, [])
        assert result.totals.tensors == len(json.loads((folder / INDEX).read_text())["weight_map"])


def set_byte(value: int) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.view(torch.uint8).view(-1)[:1].fill_(value)


def set_first(value: float) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.view(-1)[:1].fill_(value)


@pytest.mark.parametrize(
    ("form", "name", "change", "line"),
    [
        ("source", "layers.0.attn.wq_a.scale", set_byte(255), "1 E8M0 scales are 0xFF (NaN)"),
        ("source", "layers.2.ffn.experts.1.w2.scale", set_byte(255), "1 E8M0 scales are 0xFF (NaN)"),
        ("source", "layers.0.attn.wq_a.weight", set_byte(0xFF), "1 values are NaN or leave float32"),
        ("source", "layers.1.ffn.gate.tid2eid", set_first(2), "1 expert ids outside 0..1"),
        ("source", "layers.1.ffn.gate.tid2eid", set_first(-1), "1 expert ids outside 0..1"),
        ("source", "layers.2.attn.compressor.ape", set_first(float("nan")), "1 values are NaN or infinite"),
        ("source", "embed.weight", set_first(float("inf")), "1 values are NaN or infinite"),
        ("w8a8", "layers.0.attn.wq_b.weight", set_first(-128), "1 codes are -128"),
        ("w8a8", "mtp.1.ffn.experts.0.w3.scale", set_first(0), "1 scales are not finite and above 0"),
        ("w8a8", "mtp.0.main_proj.weight", set_first(float("nan")), "1 values are NaN or infinite"),
    ],
)
def test_each_bad_value_has_one_line(copy, form: str, name: str, change, line: str) -> None:
    folder = copy(form)
    edit(folder, name, change)
    assert check(folder).problems == [f"{name}: {line}"]
    assert check(folder, values=False).problems == []


def test_a_scale_that_overflows_float32_is_found_by_decoding(copy) -> None:
    folder = copy("source")
    edit(folder, "layers.0.ffn.experts.0.w1.scale", set_byte(254))
    edit(folder, "layers.0.attn.wkv.scale", set_byte(254))
    lines = check(folder).problems
    assert [line.split(":")[0] for line in lines] == ["layers.0.attn.wkv.weight", "layers.0.ffn.experts.0.w1.weight"]
    assert all("leave float32" in line for line in lines)


def test_structure_faults_are_listed_all_at_once(copy) -> None:
    folder = copy("w8a8")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["layers.0.attn.wq_a.scale"] = index["weight_map"].pop("layers.1.attn.attn_sink")
    index["metadata"]["total_size"] = 1
    (folder / INDEX).write_text(json.dumps(index))
    shard = folder / "model-00001-of-00008.safetensors"
    save_file({"embed.weight": load_file(shard)["embed.weight"].half()}, shard)
    text = "\n".join(check(folder).problems)
    for expected in (
        "layers.1.attn.attn_sink: missing from the index",
        "layers.0.attn.wq_a.scale: in the index but not part of this model",
        "layers.1.attn.attn_sink: in model-00003-of-00008.safetensors but not part of this model",
        "embed.weight has dtype F16",
        "metadata.total_size is 1, expected",
    ):
        assert expected in text


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        check(tmp_path)
