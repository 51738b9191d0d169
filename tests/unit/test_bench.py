"""Benchmarks: figures per token and not per chunk, honest arrivals, prompts that do and do not share, a table, a drawing."""

import asyncio
import contextlib
import itertools
import json
import math
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from cli.bench import table
from cli.main import app
from dsv4.errors import ConfigError, Dsv4Error, EngineError
from serving.args import EngineArgs, speculation
from serving.bench.client import Endpoint
from serving.bench.offline import add, run_batches
from serving.bench.online import poisson_arrivals, run_arrivals, speculation_counters
from serving.bench.plot import draw
from serving.bench.point import Load, Spread, summarise
from serving.bench.prompts import Prompts
from serving.bench.records import Record, apportion
from serving.bench.sweep import at_width, serve_flags
from serving.request import EngineOutput, FinishReason, Speculation

METRICS = """# HELP vllm:spec_decode_num_drafts Verify steps.
vllm:spec_decode_num_drafts_total{model_name="stub",engine="0"} %d.0
vllm:spec_decode_num_draft_tokens_total{model_name="stub",engine="0"} %d.0
vllm:spec_decode_num_accepted_tokens_total{model_name="stub",engine="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="stub",engine="0",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="stub",engine="0",position="1"} %d.0
"""


class Stub:
    """An OpenAI server that sends `step` tokens at a time, `pause_s` apart."""

    def __init__(self, step: int, pause_s: float, *, token_ids: bool = True, status: int = 200, fail: bool = False):
        self.step, self.pause_s, self.token_ids, self.status, self.fail = step, pause_s, token_ids, status, fail
        self.bodies: list[dict] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split()[0])
        body = await reader.readexactly(length)
        if "/v1/models" in head:
            plain = json.dumps({"data": [{"id": "stub"}]})
        elif "/metrics" in head:
            plain = METRICS % tuple(len(self.bodies) * n for n in (4, 28, 6, 4, 2))
        elif self.status != 200:
            plain = '{"error": {"message": "no"}}'
        else:
            await self.stream(json.loads(body), writer)
            return
        status = 200 if "/v1/completions" not in head else self.status
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(plain)}\r\n\r\n{plain}".encode())
        writer.close()

    async def stream(self, body: dict, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)

        def send(value: dict | str) -> None:
            data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
            for piece in (data[:7], data[7:]):  # events may be cut anywhere
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        loop, count = asyncio.get_running_loop(), body["max_tokens"]
        start = loop.time()
        for chunk, at in enumerate(range(0, count, self.step)):
            await asyncio.sleep(start + chunk * self.pause_s - loop.time())
            tokens = min(self.step, count - at)
            choice = {"index": 0, "text": "word " * tokens, "finish_reason": None}
            send({"choices": [choice | ({"token_ids": [5] * tokens} if self.token_ids else {})]})
            if self.fail:
                send({"error": {"message": "the engine failed"}})
        usage = {"prompt_tokens": 9, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 3}}
        send({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        send({"choices": [], "usage": usage})
        send("[DONE]")
        writer.write(b"0\r\n\r\n")
        writer.close()


@contextlib.contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def start() -> asyncio.Server:
        server = await asyncio.start_server(stub.answer, "127.0.0.1", 0)
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        ready.set()
        return server

    async def stop(server: asyncio.Server) -> None:
        server.close()
        await server.wait_closed()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*rest, return_exceptions=True)

    def run() -> None:
        server = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(stop(server))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def online(stub: Stub, **fields):
    fields = {"rate": 50.0, "requests": 3, "tokens": 48, "prefix": "cold", "k": None, "seed": 0} | fields
    endpoint = Endpoint(base=stub.url, model="stub", extended=stub.token_ids)
    return run_arrivals(endpoint, Prompts(8), **fields)


@pytest.mark.parametrize("token_ids", [True, False])
def test_six_tokens_a_chunk_at_60_ms_are_10_ms_a_token(token_ids: bool) -> None:
    with serving(Stub(6, 0.06, token_ids=token_ids)) as stub:
        point = online(stub)
    assert point.failed == 0 and point.output_tokens == 3 * 48
    assert point.per_token.p50 == pytest.approx(10, rel=0.5)
    assert point.gap.p50 == pytest.approx(10, rel=0.5)
    assert (point.prompt_tokens, point.cached_tokens) == (27, 9)
    assert stub.bodies[0].get("ignore_eos", False) is token_ids


def test_speculation_is_what_the_metrics_gained() -> None:
    with serving(Stub(8, 0.0)) as stub:
        point = online(stub, requests=5)
        totals = asyncio.run(speculation_counters(Endpoint(base=stub.url)))
    assert totals.verify_steps == 4 * 6  # the first request is no part of the figures
    assert point.accepted_length == pytest.approx(1 + 6 / 4)
    assert point.acceptance == (1.0, 0.5)


def test_failures_are_counted_and_named() -> None:
    with serving(Stub(8, 0.0, status=503)) as stub, pytest.raises(EngineError, match="HTTP 503"):
        online(stub)
    with serving(Stub(8, 0.0, fail=True)) as stub, pytest.raises(Dsv4Error, match="the engine failed"):
        online(stub)
    gone = asyncio.run(Endpoint(base="http://127.0.0.1:9").complete("x", 2, 0.0))
    assert gone.error and gone.tokens == 0
    with pytest.raises(ConfigError, match="http"):
        Endpoint(base="localhost:8000")


def test_the_command_against_a_running_server(tmp_path) -> None:
    with serving(Stub(6, 0.06)) as stub:
        flags = ["--url", stub.url, "--model", "auto", "--rate", "40", "--requests", "2", "--output-tokens", "30"]
        files = ["--json", str(tmp_path / "b.json"), "--svg", str(tmp_path / "b.svg")]
        result = CliRunner().invoke(app, ["bench", *flags, *files])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "b.json").read_text())["points"]
    assert [point["prefix"] for point in found] == ["cold", "warm"]
    assert all(point["per_token_ms"]["p50"] == pytest.approx(10, rel=0.5) for point in found)
    assert stub.bodies[0]["model"] == "stub"
    assert ET.parse(tmp_path / "b.svg").getroot().tag.endswith("svg")
    assert "online" in result.output


@pytest.mark.parametrize("flags", [["--mode", "fast"], ["--prefix", "hot"], ["--rate", "0"], ["--url", "nowhere"]])
def test_the_command_refuses(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "--model", "x", *flags])
    assert result.exit_code == 1 and "error: --" in result.output


def test_records() -> None:
    record = Record(1.0, [(2.0, 1), (2.08, 8), (2.12, 4)])
    assert record.first_s == 1.0 and record.tokens == 13
    assert record.per_token_s == pytest.approx(0.01)
    assert list(record.gaps_s()) == pytest.approx([0.01] * 12)
    assert Record(1.0, [(2.0, 8)]).per_token_s is None
    record.move(-1.0)
    assert record.due == 0.0 and record.arrivals[0] == (1.0, 1)
    assert apportion(12, [30, 30]) == [6, 6] and apportion(4, [0, 0]) == [2, 2]
    assert sum(apportion(17, [1, 5, 2, 9, 4])) == 17


def test_percentiles_and_totals() -> None:
    spread = Spread.of(i / 1000 for i in range(1, 101))
    assert (spread.p50, spread.p95, spread.p99) == pytest.approx((50, 95, 99))
    assert math.isnan(Spread.of([]).p50)
    records = [Record(0.0, [(1.0, 1), (2.0, 9)]), Record(1.0, [(2.0, 1), (4.0, 9)]), Record(1.0, error="refused")]
    load = Load(mode="offline", k=7, level=2, prefix="cold")
    point = summarise(load, records, Speculation(verify_steps=4, accepted=8, accepted_per_position=[4, 3, 1]))
    assert (point.requests, point.failed, point.output_tokens) == (3, 1, 20)
    assert point.seconds == 4.0 and point.tokens_per_s == 5.0
    assert point.accepted_length == 3.0 and point.acceptance == (1.0, 0.75, 0.25)
    assert summarise(load, records[2:], None).to_dict()["first_ms"] == {"p50": None, "p95": None, "p99": None}
    assert table([point]).row_count == 1


def test_arrivals_do_not_depend_on_the_server() -> None:
    times = poisson_arrivals(4000, 8.0, seed=3)
    assert times[0] == 0.0 and times == sorted(times) and times == poisson_arrivals(4000, 8.0, seed=3)
    assert times[-1] == pytest.approx(500, rel=0.1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.05)


@pytest.mark.parametrize("encode", [None, lambda text: list(text.encode())])
def test_prompts(encode) -> None:
    cold = Prompts(300, encode).cold(20)
    length = 300 * (4 if encode is None else 1)
    assert all(len(prompt) == length for prompt in cold)
    assert len({tuple(prompt[:128]) for prompt in cold}) == 20
    head, warm = Prompts(600, encode).warm(5)
    assert len(head) == 384 * (4 if encode is None else 1)  # whole blocks of 128 tokens
    assert all(prompt[: len(head)] == head for prompt in warm) and len({tuple(prompt) for prompt in warm}) == 5
    with pytest.raises(ConfigError):
        Prompts(0)


def test_flags_of_the_own_server() -> None:
    args = at_width(EngineArgs(model="m", num_speculative_tokens=0, enable_prefix_caching=False, threads=1), 7)
    assert serve_flags(args) == [
        "--model", "m", "--no-enable-prefix-caching", "--num-speculative-tokens", "7", "--threads", "1"
    ]  # fmt: skip


def test_the_width_changes_and_the_rest_of_the_speculation_stays() -> None:
    asked = '{"method":"dspark","num_speculative_tokens":7,"adaptive":false}'
    for k in (0, 7):
        args = at_width(EngineArgs(model="m", speculative_config=asked), k)
        assert speculation(args.speculative_config, args.num_speculative_tokens, True) == (k, False)
    with pytest.raises(ConfigError, match="method is None"):
        at_width(EngineArgs(model="m", speculative_config="{}"), 7)


class TwoSteps:
    """An engine whose requests take two steps: one token, then the rest."""

    num_speculative_tokens = 7

    async def submit(self, request_id, prompt_ids, params):
        speculation = Speculation()
        yield EngineOutput(token_ids=[1], speculation=speculation)
        if params.max_tokens > 1:
            speculation.record(7, params.max_tokens - 2, 7)
        yield EngineOutput(
            token_ids=[1] * (params.max_tokens - 1), finish_reason=FinishReason.LENGTH, speculation=speculation
        )


def test_offline_batches() -> None:
    point = run_batches(TwoSteps(), Prompts(40, lambda text: list(text.encode())), 3, 2, 6, "warm")
    assert (point.requests, point.output_tokens, point.prompt_tokens) == (6, 36, 240)
    assert point.accepted_length == 5.0 and point.acceptance == (1, 1, 1, 1, 0, 0, 0)
    total = Speculation()
    add(total, Speculation(verify_steps=1, proposed=7, accepted=2, accepted_per_position=[1, 1]))
    add(total, Speculation(verify_steps=1, proposed=7, accepted=1, accepted_per_position=[1]))
    assert total == Speculation(verify_steps=2, proposed=14, accepted=3, accepted_per_position=[2, 1])


def test_the_drawing_is_well_formed() -> None:
    records = [Record(0.0, [(0.1, 1), (0.5, 9)])]
    loads = [
        Load(mode=mode, k=k, level=level, prefix="cold")
        for mode in ("offline", "online") for k in (0, 7, None) for level in (1, 8)
    ]  # fmt: skip
    root = ET.fromstring(draw([summarise(load, records, None) for load in loads], "a < b"))
    text = " ".join(node.text or "" for node in root.iter())
    assert "a < b" in text and "K=7, cold prefix" in text and "requests per second" in text
    assert len(root.findall(".//{*}circle")) == 3 * len(loads)
