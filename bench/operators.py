"""Where a step's time goes, operator by operator: one thread, medians over many steps.

    python -m bench.operators [--model CHECKPOINT] [--kind decode speculate] [--rows 1 8] [--form W8A8]

Each call of a step's tape is timed by itself, so what threads and barriers cost is not in it; the heading has the step as it is
replayed beside the sum of its calls.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import torch

from bench.engines import BenchEngine
from bench.models import Model
from bench.products import live_rows
from dsv4.config import StepShape
from dsv4.graph.nodes import op_name
from dsv4.ops.cpu import library
from serving.batches import Launch
from serving.worker import Worker

POSITION = 300


def step_times(worker: Worker, shape: StepShape, repeats: int) -> tuple[list[tuple[str, float]], float]:
    """Seconds of each call of the step in order, and of the whole step."""
    launch = Launch(shape, {"slots": np.arange(shape.rows, dtype=np.int32)}, shape.rows)
    runner = worker.programs[shape]._run
    names = [op_name(entry.node).removeprefix("dsv4.") for entry in runner.tape.entries]
    records, run = runner._records, library().dsv4_run
    first, size = records.ctypes.data, records.itemsize
    times: list[list[float]] = [[] for _ in names]
    whole = []
    for _ in range(repeats):
        live_rows(worker, range(shape.rows), POSITION, 1 << 20)
        began = time.perf_counter()
        worker._replay(launch)
        whole.append(time.perf_counter() - began)
        live_rows(worker, range(shape.rows), POSITION, 1 << 20)
        for i in range(len(names)):
            began = time.perf_counter()
            run(first + i * size, 1, 1)
            times[i].append(time.perf_counter() - began)
    return [(name, median(t)) for name, t in zip(names, times, strict=True)], median(whole)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a source or W8A8 checkpoint (default: random weights)")
    parser.add_argument("--kind", nargs="+", choices=("decode", "speculate"), default=["decode", "speculate"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="requests a step")
    parser.add_argument("--form", nargs="+", choices=("f32", "W8A8"), default=["W8A8"])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--calls", action="store_true", help="every call, not only sums by operator")
    options = parser.parse_args()
    model = Model(options.model, 2304)
    print(model)
    for form in options.form:
        for kind in options.kind:
            dtype = torch.float32 if form == "f32" else None
            engine = BenchEngine(model, dtype, 7 if kind == "speculate" else 0, threads=1)
            worker = engine.started.worker
            torch.set_num_threads(1)
            for rows in options.rows:
                shape = next(s for s in worker.programs.shapes if (s.kind, s.rows, s.full) == (kind, rows, False))
                calls, whole = step_times(worker, shape, options.repeats)
                sums: dict[str, list[float]] = defaultdict(list)
                for name, seconds in calls:
                    sums[name].append(seconds)
                total = sum(seconds for _, seconds in calls)
                print(f"\n{form} {shape}: {1e6 * whole:,.0f} us as replayed, {1e6 * total:,.0f} us call by call")
                if options.calls:
                    for name, seconds in calls:
                        print(f"  {name:20}{1e6 * seconds:9.1f} us")
                for name, parts in sorted(sums.items(), key=lambda item: -sum(item[1])):
                    share = sum(parts)
                    print(f"  {name:20}{len(parts):4}{1e6 * share:9.1f} us {share / total:6.1%}")
            engine.close()


if __name__ == "__main__":
    main()
