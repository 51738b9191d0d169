"""Trains the demo checkpoint from nothing: `python -m tools.train_demo WORK` (resumes what it finds in WORK).

    1. corpus      the standard library's source, a tokenizer, a split by file          tools/training/corpus.py
    2. target      six layers, then with simulated FP8 / MXFP4 / int8 rounding           tools/training/target.py
    3. rollouts    the target's own greedy continuations of training text                tools/training/rollouts.py
    4. drafter     three DSpark stages on corpus and rollouts                            tools/training/drafter.py
    5. checkpoint  the released source format                                            tools/training/export.py

Every stage is seeded and leaves its result in WORK.
"""

import argparse
import ctypes
import json
from dataclasses import fields
from pathlib import Path

import torch

from tools.training.corpus import load_corpus
from tools.training.drafter import train_drafter
from tools.training.export import write_checkpoint
from tools.training.functions import use_compiler
from tools.training.rollouts import make_rollouts
from tools.training.settings import Recipe, model_config
from tools.training.target import train_target
from tools.training.weights import initial_weights


def keep_memory() -> None:
    """Lets glibc reuse large blocks: returning every activation to the kernel costs a third of a step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def parse() -> tuple[argparse.Namespace, Recipe]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for everything that training leaves behind")
    parser.add_argument("--out", type=Path, help="write the checkpoint here when all is trained")
    parser.add_argument("--until", choices=("target", "rollouts", "drafter"), default="drafter")
    parser.add_argument("--threads", type=int, default=1)
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    args = parser.parse_args()
    return args, Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})


def main() -> None:
    args, recipe = parse()
    keep_memory()
    use_compiler()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "recipe.json").write_text(json.dumps(recipe.to_dict(), indent=2))
    cfg = model_config()
    corpus, tokenizer = load_corpus(args.work, cfg.vocab_size, cfg.eos_token_id, recipe.held_out, recipe.seed)
    print(f"{len(corpus.train):,} training tokens of {corpus.train_bytes:,} bytes, {len(corpus.held_out):,} held out")
    counts = torch.bincount(corpus.train.long(), minlength=cfg.vocab_size)
    named = initial_weights(cfg, counts, recipe.seed)
    train_target(cfg, named, corpus, recipe, args.work)
    if args.until == "target":
        return
    named = {name: weight.detach() for name, weight in named.items()}  # frozen from here on

    def rollouts_of(name: str, count: int, seed: int) -> dict[str, torch.Tensor]:
        return make_rollouts(
            cfg, named, corpus, tokenizer, recipe, args.work, args.threads, name=name, count=count, seed=seed
        )

    rollouts = rollouts_of("rollouts.pt", recipe.rollouts, recipe.seed + 1)
    others = rollouts_of("tune_rollouts.pt", recipe.tune_rollouts, recipe.seed + 5)
    if args.until == "rollouts":
        return
    train_drafter(cfg, named, corpus, rollouts, others, recipe, args.work)
    if args.out:
        write_checkpoint(args.out, named, tokenizer)


if __name__ == "__main__":
    main()
