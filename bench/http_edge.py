"""What the HTTP edge costs: an engine with no work to do, a real server, real sockets.

    python -m bench.http_edge

*Pace*: 64 streams whose engine makes 50 tokens/s each; how much later than the engine the client has a chunk.
*Saturation*: as many streams from an engine that never waits; tokens per second of the server's CPU time.
Both with steps of one token (K=0) and of four (K=7 with three drafts accepted).
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import resource
import socket
import time
from multiprocessing.connection import Connection

import tokenizers
import uvicorn
from rich.console import Console
from rich.table import Table

from serving.http.app import create_app
from serving.protocol import EngineStats
from serving.request import EngineOutput, FinishReason
from serving.tokenizer import Tokenizer


class PacedEngine:
    """Emits `step` tokens at a time, `rate` tokens per second (None: as fast as they are taken), and notes when."""

    model_name, max_model_len, vocab_size = "paced", 2**20, 256
    bos_token_id, eos_token_id, num_speculative_tokens, max_logprobs = 0, 1, 7, None

    def __init__(self, step: int, rate: float | None) -> None:
        self._step, self._rate = step, rate
        self.emitted: dict[str, list[float]] = {}

    def submit(self, request_id, prompt_ids, params):
        self.emitted[request_id] = []
        return self._run(self.emitted[request_id], params.max_tokens)

    async def _run(self, emitted, count):
        start = time.monotonic()
        for sent in itertools.count(self._step, self._step):
            await asyncio.sleep(start + sent / self._rate - time.monotonic() if self._rate else 0)
            emitted.append(time.monotonic())
            yield EngineOutput(
                token_ids=[ord("x")] * self._step,
                draft_mask=[True] * (self._step - 1) + [False],
                finish_reason=FinishReason.LENGTH if sent >= count else None,
            )
            if sent >= count:
                return

    def abort(self, request_id):
        """Nothing to let go of."""

    def stats(self):
        return EngineStats()

    async def check_health(self):
        """Always well."""

    def why_missed(self, request_id):
        return None


def byte_tokenizer() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def serve(listener: socket.socket, pipe: Connection, step: int, rate: float | None) -> None:
    """The server's process: answers "cpu" with its CPU seconds and "emitted" with the engine's notes."""
    engine = PacedEngine(step, rate)
    config = uvicorn.Config(create_app(engine, byte_tokenizer()), access_log=False, log_config=None, lifespan="off")
    server = uvicorn.Server(config)

    def answer() -> None:
        match pipe.recv():
            case "cpu":
                usage = resource.getrusage(resource.RUSAGE_SELF)
                pipe.send(usage.ru_utime + usage.ru_stime)
            case "emitted":
                pipe.send(engine.emitted)
                server.should_exit = True

    async def main() -> None:
        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        await server.serve(sockets=[listener])

    asyncio.run(main())


async def stream(port: int, count: int, stamps: dict[str, list[float]]) -> None:
    """One client: notes when each chunk arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": [120], "max_tokens": count, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    arrived: list[float] = []
    name = None
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if not line:
            raise ConnectionError("the server closed the stream before its end")
        if line.startswith(b"data: "):
            arrived.append(time.monotonic())
            name = name or json.loads(line[6:])["id"]
    writer.close()
    stamps[f"{name}-0"] = arrived


def measure(streams: int, count: int, step: int, rate: float | None) -> tuple[list[float], float]:
    """Delays of all chunks in seconds, sorted, and the server's CPU seconds."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(listener, theirs, step, rate))
    server.start()
    port = listener.getsockname()[1]
    listener.close()
    stamps: dict[str, list[float]] = {}

    async def clients() -> None:
        await stream(port, step, {})  # the first request warms up the path
        ours.send("cpu")
        await asyncio.gather(*(stream(port, count, stamps) for _ in range(streams)))

    asyncio.run(clients())
    before = ours.recv()
    ours.send("cpu")
    cpu_s = ours.recv() - before
    ours.send("emitted")
    emitted = ours.recv()
    server.join()
    delays = [there - here for name in stamps for here, there in zip(emitted[name], stamps[name], strict=True)]
    return sorted(delays), cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens per second of each stream")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the paced run")
    options = parser.parse_args()
    table = Table(title=f"HTTP edge, {options.streams} streams", title_justify="left")
    for column in ("tokens per step", "added p50 [ms]", "added p99 [ms]", "CPU share at pace", "tokens/s per core"):
        table.add_column(column, justify="right")
    for step in (1, 4):
        count = int(options.rate * options.seconds) // step * step
        delays, paced_s = measure(options.streams, count, step, options.rate)
        fast = 1000 * step
        _, cpu_s = measure(options.streams, fast, step, None)
        table.add_row(
            str(step),
            f"{1e3 * delays[len(delays) // 2]:.2f}",
            f"{1e3 * delays[len(delays) * 99 // 100]:.2f}",
            f"{paced_s / options.seconds:.0%}",
            f"{options.streams * fast / cpu_s:,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
