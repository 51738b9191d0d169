"""The loads of one benchmark, run one after the other: batches offline, arrival rates online, cold and warm prefixes."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace

from dsv4.checkpoint.demo import model_path
from serving.args import EngineArgs, speculation
from serving.bench.client import Endpoint
from serving.bench.offline import run_batches
from serving.bench.online import run_arrivals, served_model
from serving.bench.point import Point, Prefix
from serving.bench.prompts import Encode, Prompts
from serving.bench.server import own_server
from serving.build import build_engine
from serving.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """batches: requests at once, `rounds` times each. rates: requests per second, `requests` of them each."""

    prefixes: tuple[Prefix, ...]
    batches: tuple[int, ...]
    rounds: int
    rates: tuple[float, ...]
    requests: int
    input_tokens: int
    output_tokens: int
    seed: int = 0

    def offline(self, args: EngineArgs, k: int, progress: Progress | None = None) -> Iterator[Point]:
        """Through an engine in this process. Raises Dsv4Error if it cannot be built."""
        built = build_engine(at_width(args, k), progress)
        try:
            for prefix in self.prefixes:
                prompts = self._prompts(built.tokenizer.encode)
                for batch in self.batches:
                    yield run_batches(built.engine, prompts, batch, self.rounds, self.output_tokens, prefix)
        finally:
            built.engine.close()

    def online(self, args: EngineArgs, k: int) -> Iterator[Point]:
        """Against a server of our own. Raises EngineError if it does not start."""
        encode = Tokenizer.load(model_path(args.model)).encode
        with own_server(serve_flags(at_width(args, k))) as server:
            yield from self._rates(Endpoint(base=server.base), k, encode)

    def remote(self, endpoint: Endpoint) -> Iterator[Point]:
        """Against a server that runs already; prompts are text, as its tokenizer is not known."""
        if endpoint.model is None:
            endpoint = replace(endpoint, model=asyncio.run(served_model(endpoint)))
        yield from self._rates(endpoint, None, None)

    def _prompts(self, encode: Encode | None) -> Prompts:
        return Prompts(self.input_tokens, encode, self.seed)

    def _rates(self, endpoint: Endpoint, k: int | None, encode: Encode | None) -> Iterator[Point]:
        for prefix in self.prefixes:
            prompts = self._prompts(encode)
            for rate in self.rates:
                yield run_arrivals(
                    endpoint, prompts, rate=rate, requests=self.requests, tokens=self.output_tokens, prefix=prefix, k=k,
                    seed=self.seed,
                )  # fmt: skip


def at_width(args: EngineArgs, k: int) -> EngineArgs:
    """The same engine with k drafts, adaptive or not as `args` asks. Raises ConfigError if `args` asks for something else."""
    if args.speculative_config is None:
        return replace(args, num_speculative_tokens=k)
    speculation(args.speculative_config, None)
    asked = json.loads(args.speculative_config) | {"num_speculative_tokens": k}
    return replace(args, speculative_config=json.dumps(asked), num_speculative_tokens=None)


def serve_flags(args: EngineArgs) -> list[str]:
    """The command line of `dsv4 serve` that gives these arguments."""
    flags = []
    for field in fields(EngineArgs):
        value, flag = getattr(args, field.name), "--" + field.name.replace("_", "-")
        if field.default is not MISSING and value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            flags += [flag, str(value)]
    return flags
