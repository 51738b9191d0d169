"""Start-up and memory of `dsv4 serve`: seconds to ready, first and warm, and resident memory over thousands of requests.

    python -m bench.memory --model W8A8 [--requests 2000] [--k 7]

*first*: with an empty kernel cache (the compiler runs); *warm*: as every later start. Then mixed requests: prompts of 1 to 400
tokens, 1 to 48 generated, one in ten left by its client in the middle. Memory is flat if the second half of the run adds
less than 2 %; otherwise the exit code is 1.
"""

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.table import Table

from dsv4.errors import EngineError
from serving.bench.client import Endpoint
from serving.bench.online import served_model
from serving.bench.prompts import Prompts
from serving.bench.server import OwnServer, own_server
from serving.tokenizer import Tokenizer

CLIENTS = 12
SAMPLES = 20


def memory(pid: int, field: str = "VmRSS") -> float:
    """MiB of a process."""
    return int(re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def processor_s(pid: int) -> float:
    """Processor time of a process and of the children it waited for (the compiler)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def start(flags: list[str], *, empty_cache: bool) -> tuple[float, float, float]:
    """(seconds to ready, processor seconds, MiB resident when ready)."""
    with tempfile.TemporaryDirectory() as cache:
        changed = {"XDG_CACHE_HOME": cache} if empty_cache else {}
        with mock.patch.dict(os.environ, changed), own_server(flags) as server:
            return server.ready_s, processor_s(server.pid), memory(server.pid)


async def drive(server: OwnServer, tokenizer: Tokenizer, requests: int) -> list[tuple[int, float]]:
    """(requests done, MiB) over the run. Raises EngineError if a request fails."""
    endpoint = Endpoint(base=server.base)
    endpoint = Endpoint(base=server.base, model=await served_model(endpoint))
    rng = random.Random(0)
    done, samples = 0, [(0, memory(server.pid))]
    jobs = iter(range(requests))

    async def client() -> None:
        nonlocal done
        for _ in jobs:
            (prompt,) = Prompts(rng.randint(1, 400), tokenizer.encode, rng.randrange(1 << 30)).cold(1)
            request = endpoint.complete(prompt, rng.randint(1, 48), time.perf_counter())
            if rng.random() < 0.1:
                leaving = asyncio.ensure_future(request)
                await asyncio.sleep(rng.random() * 0.1)
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
            elif (record := await request).error:
                raise EngineError(record.error)
            done += 1
            if done % max(1, requests // SAMPLES) == 0:
                samples.append((done, memory(server.pid)))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a W8A8 checkpoint")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--k", type=int, default=7, choices=(0, 7))
    options = parser.parse_args()
    console = Console(width=100)
    flags = ["--model", str(options.model), "--num-speculative-tokens", str(options.k)]
    table = Table(title=f"dsv4 serve, K={options.k}; load {os.getloadavg()[0]:.1f}", title_justify="left")
    for column in ("start", "seconds to ready", "processor seconds", "MiB resident"):
        table.add_column(column, justify="right")
    for name, empty in (("first", True), ("warm", False)):
        seconds, busy, resident = start(flags, empty_cache=empty)
        table.add_row(name, f"{seconds:.1f}", f"{busy:.1f}", f"{resident:.0f}")
    console.print(table)
    with own_server(flags) as server:
        began = time.perf_counter()
        samples = asyncio.run(drive(server, Tokenizer.load(options.model), options.requests))
        seconds, peak = time.perf_counter() - began, memory(server.pid, "VmHWM")
    console.print(f"{options.requests} requests in {seconds:.0f} s; MiB resident by requests done:")
    console.print("  ".join(f"{count}: {resident:.1f}" for count, resident in samples))
    half, end = samples[len(samples) // 2][1], samples[-1][1]
    console.print(f"second half adds {end - half:+.1f} MiB ({end / half - 1:+.2%}); peak {peak:.0f} MiB")
    sys.exit(end / half > 1.02)


if __name__ == "__main__":
    main()
