"""The commands as a user runs them: make-tiny, check, convert, and a conversion that is killed and resumed."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cli.convert import check, convert
from cli.tiny import make_tiny
from dsv4.checkpoint.journal import JOURNAL

REAL = Path(__file__).parents[2] / "configs" / "model" / "deepseek-v4-flash-dspark.json"
SMALL = ["--vocab-size", "320", "--layers", "4", "--experts", "4", "--experts-per-token", "2"]

app = typer.Typer()
app.command("make-tiny")(make_tiny)
app.command()(convert)
app.command()(check)


def dsv4(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convert") / "source"
    assert dsv4("make-tiny", out, *SMALL).exit_code == 0
    return out


def test_make_check_convert_check(source: Path, tmp_path: Path) -> None:
    result = dsv4("check", source)
    assert result.exit_code == 0 and "no problems" in result.output
    result = dsv4("convert", source, tmp_path / "out", "--jobs", 2)
    assert result.exit_code == 0, result.output
    assert "headers checked" in result.output and "convert 0.00" in result.output and "100 %" in result.output
    assert "ffn.experts.w1" in result.output and "saturated" in result.output
    result = dsv4("check", tmp_path / "out")
    assert result.exit_code == 0 and "W8A8" in result.output


def test_the_default_checkpoint_is_small_and_has_every_part(tmp_path: Path) -> None:
    assert dsv4("make-tiny", tmp_path / "tiny").exit_code == 0
    files = [path for path in (tmp_path / "tiny").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20_000_000
    raw = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert list(raw) == list(json.loads(REAL.read_text()))
    assert set(raw["compress_ratios"]) == {0, 4, 128} and raw["index_n_heads"] >= 16


def test_the_real_model_is_planned_from_its_config_alone(tmp_path: Path) -> None:
    shutil.copy(REAL, tmp_path / "config.json")
    result = dsv4("convert", tmp_path, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0 and not (tmp_path / "out").exists()
    for number in ("72,317 tensors, 166,878,536,440 bytes", "72,178 tensors, 308,071,597,048 bytes", "35,579 to int8"):
        assert number in result.output
    result = dsv4("convert", tmp_path, tmp_path / "out")
    assert result.exit_code == 1 and "only --dry-run works from config.json alone" in result.output


def test_a_config_file_sets_the_shape(source: Path, tmp_path: Path) -> None:
    assert dsv4("make-tiny", tmp_path / "again", "--config", source / "config.json").exit_code == 0
    for file in sorted(path.name for path in source.iterdir() if path.is_file()):
        assert (tmp_path / "again" / file).read_bytes() == (source / file).read_bytes(), file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "{source}/config.json", "--layers", "3"], "--config sets all sizes"),
        (["--config", "{source}/tokenizer.txt"], "expected a config.json"),
        (["--vocab-size", "100"], "vocab_size is 100"),
        (["--hidden-size", "272", "--expert-width", "40"], "MXFP4 needs a multiple of 32"),
        (["--experts", "2", "--experts-per-token", "3"], "num_experts_per_tok is 3, expected at most n_routed_experts"),
    ],
)
def test_bad_sizes_are_one_line(source: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = dsv4("make-tiny", tmp_path / "out", *(a.format(source=source) for a in arguments))
    assert result.exit_code == 1
    assert message in result.output and result.output.count("\n") == 1


def test_problems_are_lines_and_an_exit_code(source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    shard = broken / "model-00003-of-00009.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    result = dsv4("check", broken)
    assert result.exit_code == 1 and "model-00003-of-00009.safetensors: truncated" in result.output
    result = dsv4("convert", broken, tmp_path / "out")
    assert result.exit_code == 1 and "truncated" in result.output and not (tmp_path / "out").exists()
    for model in ({"model_type": "deepseek_v41"}, {"vision_n_layers": 2}):
        raw = json.loads((source / "config.json").read_text()) | model
        (broken / "config.json").write_text(json.dumps(raw))
        for command in (["check", broken], ["convert", broken, tmp_path / "out"]):
            result = dsv4(*command)
            assert result.exit_code == 1 and result.output.startswith("error: ")


def test_a_checkpoint_without_its_tokenizer_is_not_whole(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "bare")
    file = tmp_path / "bare" / "tokenizer.json"
    file.unlink()
    result = dsv4("check", tmp_path / "bare", "--no-values")
    assert result.exit_code == 1 and result.output.endswith(": 1 problems\n")
    assert f"{file}: expected a tokenizer, found no such file; copy it from the checkpoint" in result.output
    file.write_text("{}")
    result = dsv4("check", tmp_path / "bare", "--no-values")
    assert result.exit_code == 1 and f"{file}: not a tokenizer that can be read" in result.output


@pytest.mark.parametrize(("call", "times"), [("pwrite", 0), ("pwrite", 40), ("fsync", 0), ("fsync", 1), ("fsync", 12)])
def test_a_full_disk_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, times: int
) -> None:
    """The kernel's error names no path where a file is open already. No part of a file is left, so a second try may begin."""
    calls, really = itertools.count(), getattr(os, call)

    def fail(*args: object) -> object:
        if next(calls) >= times:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(*args)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        result = dsv4("make-tiny", out, *SMALL)
    assert result.exit_code == 1
    assert re.fullmatch(rf"error: {re.escape(str(out))}(/[a-z][\w.-]+)?: No space left on device\n", result.output)
    assert not list(out.glob(".*"))


HALTING_CONVERSION = """
import sys, time
from pathlib import Path
from dsv4.checkpoint.convert import convert
from dsv4.checkpoint.plan import plan_conversion
def stop_after_three(nbytes):
    while len(list(Path(sys.argv[2]).glob("*.safetensors"))) >= 3:
        time.sleep(0.1)
convert(plan_conversion(sys.argv[1]), sys.argv[2], jobs=2, progress=stop_after_three)
"""


def test_a_killed_conversion_leaves_nothing_half_written_and_resumes(source: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert dsv4("convert", source, whole).exit_code == 0
    process = subprocess.Popen([sys.executable, "-c", HALTING_CONVERSION, source, out])
    deadline = time.monotonic() + 60
    while len(list(out.glob("*.safetensors"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = sorted(path.name for path in out.glob("*.safetensors"))
    assert 3 <= len(finished) < 9 and not (out / "config.json").exists()
    for name in finished:
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert dsv4("convert", source, out).exit_code == 1
    assert dsv4("convert", source, out, "--resume").exit_code == 0
    names = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file()}
    assert names == {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
    assert all((out / n).read_bytes() == (whole / n).read_bytes() for n in names if n.name != JOURNAL)
