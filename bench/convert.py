"""Speed and memory of `dsv4 convert`: peak memory must follow the largest tensor, not the checkpoint.

Converts checkpoints of the same matrix sizes and ever more layers, each in a process of its own.

    python -m bench.convert [--layers 2 8] [--jobs 2] [--dir FOLDER]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dsv4.checkpoint.plan import plan_conversion
from dsv4.checkpoint.tiny import make_tiny, tiny_config

SIZES = {
    "hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 16, "q_lora_rank": 512, "head_dim": 128,
    "num_attention_heads": 32, "o_lora_rank": 256, "o_groups": 8, "index_head_dim": 128, "vocab_size": 16384,
}  # fmt: skip

CHILD = """
import json, re, sys, time
from pathlib import Path
from dsv4.checkpoint.convert import convert
from dsv4.checkpoint.plan import plan_conversion
# Not ru_maxrss: a child inherits its parent's peak through fork.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
source, out, jobs = sys.argv[1:]
plan, before, begin, cpu = plan_conversion(source), peak(), time.monotonic(), time.process_time()
convert(plan, out, jobs=int(jobs))
print(json.dumps({"seconds": time.monotonic() - begin, "cpu_seconds": time.process_time() - cpu, "before": before, "peak": peak()}))
"""


def measure(folder: Path, layers: int, jobs: int) -> str:
    """One row of the table."""
    source, out = folder / f"source-{layers}", folder / f"w8a8-{layers}"
    make_tiny(source, raw=tiny_config(**SIZES, num_hidden_layers=layers))
    plan = plan_conversion(source)
    assert plan.checkpoint
    largest = max(spec.nbytes for spec in plan.checkpoint.specs.values())
    values = sum(weight.shape[0] * weight.shape[1] for ws in plan.shards.values() for weight in ws if weight.int8)
    child = subprocess.run([sys.executable, "-c", CHILD, source, out, str(jobs)], capture_output=True, check=True)
    got = json.loads(child.stdout)
    shutil.rmtree(source)
    shutil.rmtree(out)
    read, written = plan.source_totals.nbytes / 2**20, plan.output_totals.nbytes / 2**20
    return (
        f"{layers:>6} {read:>10,.0f} {written:>11,.0f} {largest / 2**20:>11,.0f} {got['seconds']:>8.2f} "
        f"{got['cpu_seconds']:>8.2f} "
        f"{read / got['seconds']:>10,.0f} {values / got['cpu_seconds'] / 1e6:>16,.0f} {got['before'] / 2**20:>11,.0f} "
        f"{(got['peak'] - got['before']) / 2**20:>12,.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="where to put the checkpoints (default: the temporary folder)")
    args = parser.parse_args()
    print(f"{args.jobs} jobs; sizes in MiB")
    print(
        f"{'layers':>6} {'source':>10} {'W8A8':>11} {'largest':>11} {'seconds':>8} {'CPU s':>8} {'source/s':>10} {'M values/CPU s':>16} "
        f"{'RSS before':>11} {'peak adds':>12}"
    )
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for layers in args.layers:
            print(measure(Path(folder), layers, args.jobs), flush=True)


if __name__ == "__main__":
    main()
