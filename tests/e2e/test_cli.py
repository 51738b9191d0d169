"""The commands as a user meets them: what they print, and one clear line for whatever cannot work."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app

runner = CliRunner()
K7 = '{"method":"dspark","num_speculative_tokens":7}'


def invoke(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def generate(model: Path, *flags: str) -> list[dict]:
    base = ("generate", "--model", str(model), "--json", "--ignore-eos", "--threads", "1", "--max-num-seqs", "4")
    return [json.loads(line) for line in invoke(*base, *flags).splitlines()]


def refused(*arguments: str) -> str:
    """The one line of a refusal."""
    output = invoke(*arguments, code=1)
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output
    return lines[0]


def test_generate_is_the_same_at_both_widths(tiny_w8a8: Path) -> None:
    flags = ("--prompt", "def add(a, b):", "--prompt", "import os", "--prompt", "x" * 300, "--max-tokens", "24")
    plain, fast = generate(tiny_w8a8, *flags), generate(tiny_w8a8, *flags, "--speculative-config", K7)
    assert [r["token_ids"] for r in fast] == [r["token_ids"] for r in plain]
    assert [r["text"] for r in fast] == [r["text"] for r in plain]
    for record in fast:
        assert record.keys() == {"prompt", "text", "token_ids", "finish_reason", "usage", "speculation"}
        assert record["finish_reason"] == "length" and record["usage"]["completion_tokens"] == 24
        said = record["speculation"]
        assert said["verify_steps"] > 0 and len(said["accepted_per_position"]) == 7
        assert said["verify_steps"] + said["accepted"] + said["plain_steps"] >= 23
    assert plain[0]["speculation"]["verify_steps"] == 0


def test_a_stop_string_cuts_the_text_and_the_ids(tiny_w8a8: Path) -> None:
    whole = generate(tiny_w8a8, "--prompt", "a = ", "--max-tokens", "30")[0]
    stop = whole["text"][20:24]
    for flags in ((), ("--speculative-config", K7)):
        cut = generate(tiny_w8a8, "--prompt", "a = ", "--max-tokens", "30", "--stop", stop, *flags)[0]
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        assert cut["finish_reason"] == "stop"
        assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
        assert cut["usage"]["completion_tokens"] == len(cut["token_ids"])


def test_float32_runs_a_source_checkpoint(tiny_source: Path) -> None:
    assert generate(tiny_source, "--prompt", "x", "--max-tokens", "3", "--dtype", "float32")[0]["token_ids"]


def test_a_source_checkpoint_is_refused(tiny_source: Path) -> None:
    for command in (("serve",), ("generate", "--prompt", "x")):
        assert "dsv4 convert" in refused(*command, "--model", str(tiny_source))


def test_no_such_model(tmp_path: Path) -> None:
    assert "no such file" in refused("serve", "--model", str(tmp_path / "nowhere"))


@pytest.fixture
def broken(tiny_w8a8: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_w8a8, tmp_path / "broken"))


def test_no_tokenizer(broken: Path) -> None:
    (broken / "tokenizer.json").unlink()
    assert "tokenizer" in refused("serve", "--model", str(broken))


def test_a_missing_shard(broken: Path) -> None:
    next(broken.glob("*00003*.safetensors")).unlink()
    assert "00003" in refused("generate", "--prompt", "x", "--model", str(broken))


def test_a_truncated_shard(broken: Path) -> None:
    shard = next(broken.glob("*00003*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "00003" in refused("generate", "--prompt", "x", "--model", str(broken))


def test_drafting_without_draft_stages(broken: Path) -> None:
    """K = 7 is refused by name; K = 0 never looks at mtp.*."""
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    lost = {name: shard for name, shard in index["weight_map"].items() if name.startswith("mtp.1.")}
    for name in lost:
        del index["weight_map"][name]
    for shard in set(lost.values()):
        (broken / shard).unlink()
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "mtp.1" in refused("generate", "--prompt", "x", "--model", str(broken), "--speculative-config", K7)
    assert generate(broken, "--prompt", "x", "--max-tokens", "2")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "deepseek_v41"}, "deepseek_v41"),
        ({"text_config": {}}, "text_config"),
        ({"vision_n_layers": 12}, "vision"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"compress_ratios": [0, 0, 8]}, "compress_ratios"),
        ({"head_dim": None}, "head_dim"),
    ],
)
def test_another_model(changes: dict, said: str, broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text()) | changes
    (broken / "config.json").write_text(json.dumps(config))
    assert said in refused("serve", "--model", str(broken))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": "7"}, 'num_hidden_layers is "7", expected an integer'),
        ({"hidden_size": 256.5}, "hidden_size is 256.5, expected an integer"),
        ({"rope_theta": "a"}, 'rope_theta is "a", expected a finite number'),
        ({"compress_ratios": 5}, "compress_ratios is 5, expected a list of integers"),
        ({"rope_scaling": [1]}, "rope_scaling: expected a JSON object"),
        ({"rope_scaling": {"factor": True}}, "rope_scaling: factor is true"),
        ({"quantization_config": "fp8"}, "quantization_config: expected a JSON object"),
        ({"head_dim": None}, "missing head_dim"),
    ],
)
def test_mistyped_configs(changes: dict, said: str, broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text()) | changes
    (broken / "config.json").write_text(json.dumps(config))
    assert said in refused("generate", "--prompt", "x", "--model", str(broken))


def test_a_file_where_a_folder_is_meant(tiny_w8a8: Path, tmp_path: Path) -> None:
    file = str(tiny_w8a8 / "config.json")
    assert "expected the checkpoint folder" in refused("generate", "--prompt", "x", "--model", file)
    (tmp_path / "file").write_text("here first")
    for command in (("make-tiny", str(tmp_path / "file")), ("check", file)):
        assert "Not a directory" in refused(*command)
    assert (tmp_path / "file").read_text() == "here first"


def test_texts_that_cannot_be_meant(tiny_w8a8: Path) -> None:
    model = ("generate", "--model", str(tiny_w8a8))
    assert "--prompt: not UTF-8 at character 1" in refused(*model, "--prompt", "a\udcff")
    assert "--stop: not UTF-8" in refused(*model, "--prompt", "a", "--stop", "\udcff")
    assert "must not be empty" in refused(*model, "--prompt", "a", "--stop", "")


def test_an_address_in_use_is_refused_before_loading(tiny_w8a8: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        output = invoke("serve", "--model", str(tiny_w8a8), "--port", port, code=1)
    assert f"error: --host 127.0.0.1 --port {port}: cannot listen there (Address already in use)" in output
    assert "start:" not in output
    assert "cannot listen" in refused("serve", "--model", str(tiny_w8a8), "--host", "nowhere.invalid")


def test_flags_are_refused_before_loading(tiny_w8a8: Path) -> None:
    model = ("--model", str(tiny_w8a8))
    assert "--block-size" in refused("serve", *model, "--block-size", "128")
    assert "num_speculative_tokens" in refused(
        "serve", *model, "--speculative-config", '{"method":"dspark","num_speculative_tokens":3}'
    )
    assert "--platform" in refused("serve", *model, "--platform", "gpu")
    assert "unknown field 'x'" in refused("serve", *model, "--generate-config", '{"x":1}')


def test_npus_are_missed_by_name(tiny_w8a8: Path) -> None:
    line = refused("serve", "--model", str(tiny_w8a8), "--platform", "a2a3", "--dp", "2", "--ep", "8", "--tp", "4")
    assert "torch_npu" in line and "--platform cpu" in line


def test_the_real_model_is_planned_without_weights(tmp_path: Path) -> None:
    shutil.copy("configs/model/deepseek-v4-flash-dspark.json", tmp_path / "config.json")
    plan = invoke("convert", str(tmp_path), str(tmp_path / "out"), "--dry-run")
    for number in ("72,317", "166,878,536,440", "72,178", "308,071,597,048"):
        assert number in plan
    assert not (tmp_path / "out").exists()


def test_help_lists_every_command() -> None:
    for name in ("serve", "generate", "convert", "check", "make-tiny"):
        assert name in invoke("--help")
        invoke(name, "--help")


def test_flags_from_a_file(tiny_w8a8: Path, tmp_path: Path) -> None:
    """Each shipped deployment parses; the command line wins; an unknown flag is named with its neighbour."""
    file = tmp_path / "flags.toml"
    file.write_text(
        'max-model-len = 256\nmax_num_seqs = 2\n[speculative_config]\nmethod = "dspark"\nnum_speculative_tokens = 7\n'
    )
    record = generate(tiny_w8a8, "--prompt", "x", "--max-tokens", "4", "--flags", str(file))[0]
    assert record["speculation"]["proposed"] > 0
    assert "--max-model-len is 1" in refused(
        "serve", "--model", str(tiny_w8a8), "--flags", str(file), "--max-model-len", "1"
    )
    for name in ("a3-16-dies", "a3-8-dies"):
        line = refused("serve", "--model", str(tiny_w8a8), "--flags", f"configs/serve/{name}.toml")
        assert "torch_npu" in line
    file.write_text("max_model_length = 3\n")
    output = invoke("serve", "--model", str(tiny_w8a8), "--flags", str(file), code=2)
    assert "max_model_length" in output and "max_model_len" in output
