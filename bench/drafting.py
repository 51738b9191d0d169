"""What drafting buys on text that the demo model has never seen: K=7 over K=0, turn about, in one run.

    python -m bench.drafting [--model CHECKPOINT] [--batch 1 8] [--prompts 64]

The held-out files of the demo's training (`tools/training/corpus.py`), W8A8, greedy, natural drafts. A batch is requests that
begin together, timed from their first tokens on, whose last ones run with ever fewer; and, "a new one for each that ends", so
many at any time, as in a busy server, timed with their prompts. Tokens are compared too.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench.against_transformers import print_table
from bench.engines import BenchEngine
from bench.models import Model
from dsv4.checkpoint.demo import model_path
from dsv4.config import load_config
from tools.training.corpus import split, stream
from tools.training.rollouts import prompts_of
from tools.training.settings import Recipe

SHORTEST, LONGEST, TOKENS = 32, 256, 256


def held_out_prompts(path: Path, count: int) -> list[list[int]]:
    """Stretches of held-out files, in the model's tokens."""
    recipe = Recipe()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    _, held_out = split(recipe.held_out, recipe.seed)
    ids = stream(tokenizer, held_out, load_config(path).eos_token_id)
    return prompts_of(ids, count, SHORTEST, LONGEST, recipe.seed + 3)


def compare(engines: Mapping[int, BenchEngine], batches: Sequence[Sequence[Sequence[int]]], at_once: int) -> list[str]:
    """One row of the table: every batch at K=0 and at K=7, turn about, `at_once` requests at a time."""
    for engine in engines.values():
        engine.run(batches[0][:at_once], TOKENS)
    before = engines[7].started.engine.stats().speculation
    seconds, counted, tokens, same = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0), 0, 0
    for turn, batch in enumerate(batches):
        together = len(batch) == at_once
        found = {k: engines[k].run(batch, TOKENS, at_once) for k in ((0, 7) if turn % 2 else (7, 0))}
        for k, timing in found.items():
            seconds[k] += timing.total_s - together * timing.first_s
            counted[k] += sum(map(len, timing.tokens)) - together * len(batch)
        for plain, drafted in zip(found[0].tokens, found[7].tokens, strict=True):
            tokens += len(plain)
            same += sum(a == b for a, b in zip(plain, drafted, strict=True))
    now = engines[7].started.engine.stats().speculation
    steps, plain_steps = now.verify_steps - before.verify_steps, now.plain_steps - before.plain_steps
    accepted = 1 + (now.accepted - before.accepted) / steps if steps else float("nan")
    rates = {k: count / seconds[k] for k, count in counted.items()}
    return [*(f"{rates[k]:,.0f}" for k in (0, 7)), f"{rates[7] / rates[0]:.2f}", f"{accepted:.2f}",
            f"{plain_steps / (steps + plain_steps):.0%}", f"{same:,} of {tokens:,}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if not 1 <= max(options.batch) <= min(8, options.prompts) or min(options.batch) < 1:
        parser.error(f"--batch: expected 1 to {min(8, options.prompts)} requests at once, got {options.batch}")
    path = model_path(options.model)
    if not (path / "config.json").is_file():
        parser.error(f"--model {options.model}: expected `demo` or a converted checkpoint folder")
    model = Model(path, LONGEST + TOKENS)
    prompts = held_out_prompts(path, options.prompts)
    engines = {k: BenchEngine(model, None, k, options.threads) for k in (0, 7)}
    rows = []
    for size in options.batch:
        together = [prompts[at : at + size] for at in range(0, len(prompts) - size + 1, size)]
        rows.append([f"{size}", *compare(engines, together, size)])
        if size > 1:
            rows.append([f"{size}, a new one for each that ends", *compare(engines, [prompts, prompts], size)])
    for engine in engines.values():
        engine.close()
    print_table(f"{model}\nheld-out text, natural drafts",
                ["batch", "K=0 tokens/s", "K=7 tokens/s", "K=7 / K=0", "tokens a step", "without drafts", "same tokens"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
