"""Measures a demo checkpoint and writes its model card: `python -m tools.eval_demo CHECKPOINT WORK`.

Losses on held-out text in float32 and W8A8, and greedy continuations of held-out prompts at K=0 and K=7 through the serving
engine: acceptance by position, equality of the tokens, samples. WORK is the folder that `train_demo` left behind.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

import dsv4
from dsv4.checkpoint.files import write_atomic
from dsv4.checkpoint.manifest import weights
from dsv4.config import ModelConfig
from dsv4.params import Params
from serving.request import Speculation
from tools.training.card import card, loss_plot
from tools.training.corpus import Corpus, load_corpus, stretches
from tools.training.export import write_w8a8
from tools.training.generate import Continuation, continuations
from tools.training.rollouts import prompts_of
from tools.training.settings import DRAFTS, Recipe
from tools.training.weights import make_params

LENGTH, SEQUENCES = 512, 128
PROMPTS, SHORTEST, LONGEST, MAX_TOKENS = 64, 32, 256, 256
SHORT_TOKENS = 64  # before most answers begin to repeat themselves
SAMPLES, SAMPLE_LINES, SAMPLE_TOKENS = 8, 6, 80


def loss(cfg: ModelConfig, params: Params, ids: Tensor) -> float:
    """Mean next-token loss in nats over rows [n, S], by the serving prefill."""
    losses = [F.cross_entropy(dsv4.forward(cfg, params, row).logits[:-1], row[1:].long()) for row in ids]
    return torch.stack(losses).mean().item()


def losses(source: Path, w8a8: Path, trained: dict[str, Tensor], corpus: Corpus) -> dict[str, Any]:
    """Of the weights as trained (float32), as the source checkpoint rounds them (decoded to float32), and of W8A8."""
    ids = stretches(corpus.held_out, LENGTH)
    ids = ids[torch.linspace(0, len(ids) - 1, min(SEQUENCES, len(ids))).long()]  # spread over all held-out files
    cfg = dsv4.load_config(source)
    forms = {
        "trained": make_params(cfg, trained, LENGTH, quantised=False, drafter=False),
        "float32": dsv4.load_params(source, cfg, torch.float32, max_positions=LENGTH, drafter=False),
        "w8a8": dsv4.load_params(w8a8, dsv4.load_config(w8a8), max_positions=LENGTH, drafter=False),
    }
    found = {name: loss(cfg, params, ids) for name, params in forms.items()}
    per_byte = len(corpus.held_out) / corpus.held_out_bytes / math.log(2)
    return found | {"tokens": ids.numel(), "bits_per_byte": found["w8a8"] * per_byte}


def total(answers: list[Continuation]) -> Speculation:
    """Sums over requests."""
    sums = Speculation(accepted_per_position=[0] * DRAFTS)
    for one in (answer.speculation for answer in answers):
        sums.verify_steps += one.verify_steps
        sums.proposed += one.proposed
        sums.accepted += one.accepted
        for position, count in enumerate(one.accepted_per_position):
            sums.accepted_per_position[position] += count
    return sums


def repeated_share(answers: list[Continuation], width: int = 16) -> float:
    """Share of generated tokens that end a run of `width` tokens seen before in the same answer."""
    hits = count = 0
    for tokens in (answer.tokens for answer in answers):
        seen: set[tuple[int, ...]] = set()
        for end in range(width, len(tokens) + 1):
            run = tuple(tokens[end - width : end])
            hits += run in seen
            seen.add(run)
        count += len(tokens)
    return hits / count


def generation(w8a8: Path, corpus: Corpus, tokenizer: Tokenizer, seed: int, threads: int) -> dict[str, Any]:
    prompts = prompts_of(corpus.held_out, PROMPTS, SHORTEST, LONGEST, seed)
    plain = continuations(w8a8, prompts, MAX_TOKENS, drafts=0, rows=16, threads=threads)
    drafted = continuations(w8a8, prompts, MAX_TOKENS, drafts=DRAFTS, rows=16, threads=threads)
    short = continuations(w8a8, prompts, SHORT_TOKENS, drafts=DRAFTS, rows=16, threads=threads)
    same = sum(x == y for a, b in zip(plain, drafted, strict=True) for x, y in zip(a.tokens, b.tokens, strict=False))
    speculation = total(drafted)
    samples = [
        {
            "prompt": "\n".join(tokenizer.decode(prompt).splitlines()[-SAMPLE_LINES:]),
            "completion": tokenizer.decode(answer.tokens[:SAMPLE_TOKENS]),
        }
        for prompt, answer in list(zip(prompts, drafted, strict=True))[:: PROMPTS // SAMPLES]
    ]
    return {
        "prompts": PROMPTS, "prompt_tokens": [SHORTEST, LONGEST], "max_tokens": MAX_TOKENS,
        "generated_tokens": sum(len(answer.tokens) for answer in plain), "identical_tokens": same,
        "same_lengths": all(len(a.tokens) == len(b.tokens) for a, b in zip(plain, drafted, strict=True)),
        "verify_steps": speculation.verify_steps, "mean_accepted_length": speculation.mean_accepted_length,
        "accepted_per_position": [n / speculation.verify_steps for n in speculation.accepted_per_position],
        "repeated_share": repeated_share(drafted), "short_tokens": SHORT_TOKENS,
        "short_mean_accepted_length": total(short).mean_accepted_length, "short_repeated_share": repeated_share(short),
        "samples": samples,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="source format; README.md and training.svg are written into it")
    parser.add_argument("work", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cfg = dsv4.load_config(args.checkpoint)
    recipe = Recipe(**json.loads((args.work / "recipe.json").read_text()))
    corpus, tokenizer = load_corpus(args.work, cfg.vocab_size, cfg.eos_token_id, recipe.held_out, recipe.seed)
    w8a8 = args.work / "w8a8"
    write_w8a8(args.checkpoint, w8a8)
    trained = torch.load(args.work / "target.pt", weights_only=True)["named"]
    sizes = {draft: sum(math.prod(w.shape) for w in weights(cfg) if w.is_draft == draft) for draft in (False, True)}
    figures = {"target_parameters": sizes[False], "drafter_parameters": sizes[True]}
    figures |= {"loss": losses(args.checkpoint, w8a8, trained, corpus)}
    figures |= generation(w8a8, corpus, tokenizer, recipe.seed + 3, args.threads)
    write_atomic(args.work / "figures.json", json.dumps(figures, indent=2, ensure_ascii=False))
    histories = {name: json.loads((args.work / f"{name}.json").read_text()) for name in ("target", "drafter", "tune")}
    files = json.loads((args.work / "files.json").read_text())
    sizes = {"train_bytes": corpus.train_bytes, "held_out_bytes": corpus.held_out_bytes}
    write_atomic(args.checkpoint / "training.svg", loss_plot(**histories))
    write_atomic(args.checkpoint / "README.md", card(recipe.to_dict(), files, sizes, figures))
    print(json.dumps({k: v for k, v in figures.items() if k != "samples"}, indent=2))


if __name__ == "__main__":
    main()
