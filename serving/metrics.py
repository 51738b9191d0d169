"""Prometheus metrics in vLLM's spelling, so that its dashboards work.

Gauges and counters are read from the engine at scrape time, nothing is counted twice; latencies are observed here, at
the edge, as a client sees them. One registry per app: two apps in one process never share a number.
"""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.protocol import EngineClient
from serving.request import FinishReason

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_LABELS = ("model_name", "engine")


class Metrics:
    """The numbers of one app; `observe()` gives each request its own observer."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name))
        labels = {"model_name": model_name, "engine": "0"}
        self._success = Counter(
            "vllm:request_success",
            "Requests finished, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in FinishReason:  # a counter that has never moved must still be scraped as 0
            self._success.labels(**labels, finished_reason=reason.value)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, about, _LABELS, buckets=buckets, registry=self._registry).labels(**labels)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "Request to first token.", _FIRST_TOKEN_S)
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds",
            "Time per token after the first step; a step of n tokens counts n times its share.",
            _PER_TOKEN_S,
        )
        self.per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token of a request.", _PER_TOKEN_S
        )
        self.end_to_end = histogram("vllm:e2e_request_latency_seconds", "Request to last token.", _REQUEST_S)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.request_output = histogram("vllm:request_generation_tokens", "Generated tokens per request.", _TOKENS)
        self._labels = labels

    def observe(self) -> "RequestObserver":
        return RequestObserver(self)

    def finished(self, reason: FinishReason) -> None:
        self._success.labels(**self._labels, finished_reason=reason.value).inc()

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class RequestObserver:
    """Times one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._first: float | None = None
        self._last = self._start
        self._first_step = 0
        self._count = 0

    def tokens(self, count: int) -> None:
        """One step delivered `count` tokens."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._first_step = count
            self._metrics.first_token.observe(now - self._start)
        else:
            share = (now - self._last) / count
            for _ in range(count):
                self._metrics.inter_token.observe(share)
        self._count += count
        self._last = now

    def finished(self, reason: FinishReason, prompt_tokens: int, completion_tokens: int) -> None:
        metrics = self._metrics
        metrics.finished(reason)
        metrics.end_to_end.observe(time.monotonic() - self._start)
        metrics.request_prompt.observe(prompt_tokens)
        metrics.request_output.observe(completion_tokens)
        if self._first is not None and self._count > self._first_step:
            metrics.per_output_token.observe((self._last - self._first) / (self._count - self._first_step))


class _EngineCollector(Collector):
    """Reads the engine's own counters when scraped."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._labels = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        speculation = stats.speculation
        for name, about, value in (
            ("num_requests_running", "Requests that have a row in the batch.", stats.running),
            ("num_requests_waiting", "Requests in the queue.", stats.waiting),
            ("kv_cache_usage_perc", "Share of cache pages in use, 0 to 1.", stats.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, about, value in (
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("num_preemptions", "Requests put back to the queue for lack of pages.", stats.preemptions),
            ("spec_decode_num_drafts", "Verify steps.", speculation.verify_steps),
            ("spec_decode_num_plain_steps", "Steps without drafts because that was faster.", speculation.plain_steps),
            ("spec_decode_num_draft_tokens", "Tokens proposed by the drafter.", speculation.proposed),
            ("spec_decode_num_accepted_tokens", "Proposed tokens that the target confirmed.", speculation.accepted),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", about, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Verify steps whose draft at this position was confirmed.",
            labels=(*_LABELS, "position"),
        )
        width = max(self._engine.num_speculative_tokens, len(speculation.accepted_per_position))
        accepted = [*speculation.accepted_per_position, *[0] * width][:width]
        for position, count in enumerate(accepted):
            positions.add_metric((*self._labels, str(position)), count)
        yield positions
