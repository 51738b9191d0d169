"""Goes on training the draft stages of a checkpoint: `python -m tools.tune_demo CHECKPOINT WORK --out OUT`.

The target is frozen as it is stored. Every round makes new greedy continuations of training text and trains on those alone, as
the last phase of `tools/training/drafter.py` does: fresh answers raise the acceptance where further passes over old ones do not.
Resumes what it finds in WORK.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.models import Model
from dsv4.checkpoint.demo import model_path
from tools.train_demo import keep_memory
from tools.training.corpus import load_corpus
from tools.training.drafter import DrafterTraining, Outputs
from tools.training.export import write_checkpoint
from tools.training.functions import use_compiler
from tools.training.rollouts import make_rollouts
from tools.training.settings import Recipe, model_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="`demo`, or a folder in source format")
    parser.add_argument("work", type=Path, help="folder for everything that training leaves behind")
    parser.add_argument("--out", type=Path, help="write the checkpoint here when all is trained")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2500, help="optimiser steps a round")
    parser.add_argument("--answers", type=int, default=4096, help="continuations a round")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--level", type=float, default=0.3, help="share of all steps before the rate declines")
    parser.add_argument("--rows", type=int, default=8, help="sequences a step")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    recipe = Recipe(
        tune_lr=args.lr, drafter_level=args.level, tune_steps=args.rounds * args.steps, drafter_rows=args.rows
    )
    keep_memory()
    use_compiler()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    cfg, path = model_config(), model_path(args.checkpoint)
    saved = args.work / "tokenizer.json"
    if not saved.exists():
        saved.write_text(Tokenizer.from_file(str(path / "tokenizer.json")).to_str())
    corpus, tokenizer = load_corpus(args.work, cfg.vocab_size, cfg.eos_token_id, recipe.held_out, recipe.seed)
    named = Model(path, recipe.rollout_length).float_weights()
    named = {name: weight.long() if name.endswith("tid2eid") else weight for name, weight in named.items()}
    for turn in range(args.rounds):
        stop = (turn + 1) * args.steps
        rollouts = make_rollouts(
            cfg, named, corpus, tokenizer, recipe, args.work, args.threads,
            name=f"rollouts-{turn}.pt", count=args.answers, seed=recipe.seed + 101 + turn,
        )  # fmt: skip
        training = DrafterTraining(cfg, named, corpus, rollouts, recipe)
        trainer = training.trainer(args.work / "tune.pt", recipe.tune_steps, recipe.tune_lr, recipe.seed + 6, stop)
        if trainer.step < stop:
            outputs = Outputs(training.sequences, training.params(), rollouts)
            trainer.run(lambda step, rng: training.tune_step(outputs, rng), after=training.after)  # noqa: B023
    (args.work / "tune-recipe.json").write_text(json.dumps(vars(args), default=str))
    if args.out:
        write_checkpoint(args.out, named, tokenizer)


if __name__ == "__main__":
    main()
