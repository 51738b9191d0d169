"""Trained weights to a checkpoint in the released source format, and on to W8A8, by the project's own writers."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from dsv4.checkpoint.convert import convert
from dsv4.checkpoint.plan import plan_conversion
from dsv4.checkpoint.source import write_source
from dsv4.checkpoint.tiny import write_tokenizer
from tools.training.settings import demo_config


def write_checkpoint(out: Path, named: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Replaces the folder `out`."""
    shutil.rmtree(out, ignore_errors=True)
    write_source(out, demo_config(), ((name, weight.detach()) for name, weight in named.items()))
    write_tokenizer(out, tokenizer)


def write_w8a8(source: Path, out: Path) -> None:
    """Replaces the folder `out` with the conversion of `source`."""
    shutil.rmtree(out, ignore_errors=True)
    convert(plan_conversion(source), out)
