"""The engine against `transformers`: same weights, same threads, one run, every figure a ratio of medians.

    python -m bench.against_transformers [--model CHECKPOINT] [--repeats 5] [--only decode prefill steps ttft]

*decode*   tokens/s after the first token at batch 1 and 8: eager `generate`, K=0 in float32 and W8A8, and K=7 with a drafter
           that is always right (its cost is paid, its drafts are replaced)
*prefill*  a prompt of 2,048 tokens to its first token
*steps*    a decode step at 1 and 8 rows against its matrix products alone, as `F.linear` and in our own kernels
*ttft*     time to the first token at K=7 over K=0

`transformers` has the dequantised weights in float32. Repeats are interleaved, so that all see the same machine. On a machine
that is busy with other things, `--clock cpu --threads 1` compares processor time instead: everything either side computes.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import StoppingCriteria

from bench.engines import BenchEngine, Clock, always_right
from bench.models import Model
from bench.products import live_rows, step_products
from dsv4.config import StepShape
from serving.batches import Launch
from serving.worker import Worker
from tests.support.models import hf_model

LONG, SHORT, TOKENS = 2048, 64, 96
FORMS = {"f32": torch.float32, "W8A8": None}
console = Console(width=120)


def prompts(model: Model, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, model.cfg.vocab_size, (count, length), generator=generator).tolist()


def interleaved(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median of each run's figure, after one round that is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            value = run()
            if turn:
                found[name].append(value)
    return {name: median(values) for name, values in found.items()}


class Stamps(StoppingCriteria):
    """Stops nothing; notes when each token was there."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.at: list[float] = []

    def __call__(self, input_ids, scores, **_):
        self.at.append(self.clock())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def reference_rate(reference, batch: list[list[int]], count: int, clock: Clock) -> float:
    """Tokens per second of eager `generate` after the first token of each row."""
    stamps, ids = Stamps(clock), torch.tensor(batch)
    reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        pad_token_id=0, stopping_criteria=[stamps],
    )  # fmt: skip
    return len(batch) * (count - 1) / (stamps.at[-1] - stamps.at[0])


def print_table(title: str, head: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(head):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


class Comparison:
    """Engines are started when first asked for and stay: everything is measured on the same ones."""

    def __init__(self, model: Model, threads: int, repeats: int, clock: Clock) -> None:
        self.model, self.threads, self.repeats, self.clock = model, threads, repeats, clock
        self._engines: dict[tuple[str, int], BenchEngine] = {}
        self._reference = None

    def _start(self, form: str, k: int, **flags) -> BenchEngine:
        return BenchEngine(self.model, FORMS[form], k, self.threads, self.clock, **flags)

    def engine(self, form: str, k: int) -> BenchEngine:
        if (form, k) not in self._engines:
            self._engines[form, k] = self._start(form, k)
        return self._engines[form, k]

    @property
    def reference(self):
        if self._reference is None:
            self._reference = hf_model(self.model.cfg, self.model.float_weights())
            self._reference.generation_config.eos_token_id = None
        return self._reference

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def decode(self) -> None:
        batches = {size: prompts(self.model, size, SHORT) for size in (1, 8)}
        right = {}
        for form in FORMS:
            known = {}
            for batch in batches.values():
                tokens = self.engine(form, 0).run(batch, TOKENS).tokens
                known |= {tuple(p): t for p, t in zip(batch, tokens, strict=True)}
            right[form] = self._start(form, 7, adaptive=False)
            always_right(right[form].started.worker, known)
        rows = []
        for size, batch in batches.items():
            runs = {"transformers": lambda batch=batch: reference_rate(self.reference, batch, TOKENS, self.clock)}
            for form in FORMS:
                for name, engine in ((f"K=0 {form}", self.engine(form, 0)), (f"K=7 {form}, always right", right[form])):
                    runs[name] = lambda engine=engine, batch=batch: engine.run(batch, TOKENS).decode_rate
            rates = interleaved(runs, self.repeats)
            base, plain = rates["transformers"], rates["K=0 f32"]
            rows += [
                [f"{name}, batch {size}", f"{rate:,.0f}", f"{rate / base:.1f}", f"{rate / plain:.2f}"]
                for name, rate in rates.items()
            ]
        print_table("decode", ["", "tokens/s", "x transformers", "x K=0 f32"], rows)
        for engine in right.values():
            engine.close()

    @torch.no_grad()
    def prefill(self) -> None:
        (prompt,) = prompts(self.model, 1, LONG)
        ids = torch.tensor([prompt])

        def reference() -> float:
            began = self.clock()
            self.reference(ids, use_cache=True, logits_to_keep=1)
            return self.clock() - began

        runs = {"transformers": reference}
        runs |= {f"K=0 {f}": lambda f=f: self.engine(f, 0).run([prompt], 1).first_s for f in FORMS}
        found = interleaved(runs, self.repeats)
        rows = [[n, f"{1e3 * s:,.0f}", f"{found['transformers'] / s:.1f}"] for n, s in found.items()]
        print_table(f"prefill of {LONG:,} tokens", ["", "ms", "x transformers"], rows)

    def ttft(self) -> None:
        rows = []
        for form in FORMS:
            for length in (32, 512, LONG):
                (prompt,) = prompts(self.model, 1, length)
                engines = {f"{k}": self.engine(form, k) for k in (0, 7)}
                runs = {k: lambda e=e, p=prompt: e.run([p], 2).first_s for k, e in engines.items()}
                found = interleaved(runs, 2 * self.repeats)
                rows.append(
                    [f"{form}, {length:,} tokens", *(f"{1e3 * s:.1f}" for s in found.values()),
                     f"{found['7'] / found['0']:.2f}"]
                )  # fmt: skip
        print_table("time to first token", ["", "K=0 ms", "K=7 ms", "K=7 / K=0"], rows)

    @torch.no_grad()
    def steps(self) -> None:
        torch.set_num_threads(self.threads)
        rows = []
        for form in FORMS:
            worker: Worker = self.engine(form, 0).started.worker
            for size in (1, 8):
                shape = next(
                    s for s in worker.programs.shapes if (s.kind, s.rows, s.full) == ("decode", size, False)
                )  # fmt: skip
                found = self._step(worker, shape)
                step, bare, own = (1e3 * found[name] for name in ("step", "bare", "own"))
                rows.append([f"{form}, {size} rows", f"{step:.2f}", f"{bare:.2f}", f"{own:.2f}",
                             f"{step / bare:.2f}", f"{step / own:.2f}"])  # fmt: skip
        head = ["", "step ms", "F.linear ms", "own products ms", "step / F.linear", "step / own products"]
        print_table("decode step against its matrix products", head, rows)

    def _step(self, worker: Worker, shape: StepShape) -> dict[str, float]:
        live_rows(worker, range(shape.rows), 300, 1 << 20)
        launch = Launch(shape, {"slots": np.arange(shape.rows, dtype=np.int32)}, shape.rows)
        bare, own = step_products(worker, shape, self.threads)

        def timed(run: Callable[[], object]) -> float:
            """Of many in a row, as a server takes them; the first follow OpenMP's threads, which spin on for a while."""
            seconds = []
            for _ in range(60):
                began = self.clock()
                run()
                seconds.append(self.clock() - began)
            return median(seconds[20:])

        runs = {"step": lambda: worker._replay(launch), "own": own, "bare": bare}
        found = interleaved({name: lambda run=run: timed(run) for name, run in runs.items()}, 2 * self.repeats)
        live_rows(worker, range(shape.rows), 0, 0)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("decode", "prefill", "steps", "ttft")
    parser.add_argument(
        "--model", type=Path, help="a source or W8A8 checkpoint (default: random weights, built-in shape)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = Model(options.model, LONG + 256)
    load = os.getloadavg()[0]
    console.print(
        f"{model}; {options.threads} threads, {options.clock} clock, medians of {options.repeats}; load {load:.1f} at the start"
    )
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    comparison = Comparison(model, options.threads, options.repeats, clock)
    try:
        for part in options.only:
            getattr(comparison, part)()
    finally:
        comparison.close()
    console.print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
