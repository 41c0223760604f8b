"""Metrics for Prometheus, with vLLM's suffixes.

Every name begins with `mega_serve_`; with `vllm_names` each family appears a second time as `vllm:...`, so
that dashboards and gateways made for vLLM work. The gauges that Kubernetes gateways route by are
`num_requests_waiting`, `num_requests_running` and `kv_cache_usage_perc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mega_serve.engine.interfaces import EngineClient, EngineUnavailableError
from mega_serve.engine.requests import EngineRequest, EngineStats, RequestTimes
from mega_serve.engine.step_sizes import STEP_TOKENS

PREFIX = "mega_serve_"
VLLM_PREFIX = "vllm:"
_SECONDS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ROWS = (1, 2, 5, 10, 20, 32)


class ServerMetrics:
    """All metrics of one application, in a registry of their own.

    Args:
        connections: returns the number of open connections.
    """

    def __init__(
        self, client: EngineClient, *, vllm_names: bool = False, connections: Callable[[], int] = lambda: 0
    ) -> None:
        self._client = client
        self._vllm_names = vllm_names
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(client, connections))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token of a sequence.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of a sequence.", _ITL_SECONDS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Seconds per token after the first one, mean of a sequence.",
            _ITL_SECONDS,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the end of the response.", _SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Seconds from arrival in the engine to the first step.", _SECONDS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Seconds from the first step to the first token.", _SECONDS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "Seconds from the first token to the last.", _SECONDS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for an HTTP request.", _TOKENS
        )
        self.params_n = self._histogram("request_params_n", "Sequences asked per prompt.", _ROWS)
        self.params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked.", _TOKENS)
        self._success = self._counter("request_success", "Finished sequences.", "finished_reason")
        self._rejections = self._counter(
            "admission_rejections", "Requests answered with 429 or 503.", "reason"
        )
        self._http_requests = self._counter("http_requests", "HTTP requests.", "route", "status")

    def observe_request(self, request: EngineRequest) -> None:
        """Count a request to the engine."""
        self.prompt_tokens.observe(len(request.prompt_token_ids))
        self.params_n.observe(request.rows)
        self.params_max_tokens.observe(request.params.max_tokens)

    def observe_finish(self, reason: str, times: RequestTimes | None, tokens: int) -> None:
        """Count a sequence that has ended.

        Args:
            times: as the engine measured them.
            tokens: generated in all.
        """
        self._success.labels(reason).inc()
        if times is not None:
            self.queue_time.observe(times.queue)
            self.prefill_time.observe(times.prefill)
            self.decode_time.observe(times.decode)
            if tokens > 1:
                self.time_per_output_token.observe(times.decode / (tokens - 1))

    def observe_response(self, *, route: str, status: int, rejection: str) -> None:
        """Count an HTTP response. `route` is the route's template: paths are of clients, and unbounded."""
        self._http_requests.labels(route, str(status)).inc()
        if rejection:
            self._rejections.labels(rejection).inc()

    def render(self) -> bytes:
        """Return the exposition text, version 0.0.4."""
        try:
            model = self._client.model.name
        except EngineUnavailableError:
            model = ""
        prefixes = (PREFIX, VLLM_PREFIX) if self._vllm_names else (PREFIX,)
        families = _RenamedFamilies(list(self.registry.collect()), prefixes, model)
        return generate_latest(families)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=tuple(buckets), registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)


class _EngineCollector(Collector):
    """The newest load that the engine reported, read when Prometheus asks."""

    def __init__(self, client: EngineClient, connections: Callable[[], int]) -> None:
        self._client = client
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """Yield gauges and counters."""
        stats = self._client.stats
        gauges = (
            ("num_requests_running", "Sequences in the batch.", stats.running),
            ("num_requests_waiting", "Requests in the queue.", stats.waiting),
            ("num_tokens_waiting", "Tokens that the queue may need at most.", stats.waiting_tokens),
            ("kv_cache_usage_perc", "Used part of the KV cache; 1 is all of it.", stats.kv_usage),
            ("tokens_per_second", "Generated tokens per second, lately.", stats.tokens_per_second),
            ("checkpoint_iteration", "Iteration of the served checkpoint.", stats.iteration),
            ("engine_up", "1 while the engine steps.", int(self._client.is_alive)),
            ("http_connections", "Open connections.", self._connections()),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        counters = (
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.generation_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Sequences that lost their pages.", stats.preemptions),
            ("engine_restarts", "Restarts of a dead engine.", getattr(self._client, "restarts", 0)),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        yield _step_histogram(stats)


def _step_histogram(stats: EngineStats) -> HistogramMetricFamily:
    # no counts: the engine has not reported yet
    cumulative = list(accumulate(stats.step_counts)) or [0] * (len(STEP_TOKENS) + 1)
    bounds = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
    buckets = list(zip(bounds, cumulative, strict=True))
    name, text = PREFIX + "iteration_tokens_total", "Tokens of a step of the model."
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=stats.step_tokens)


@dataclass(frozen=True, slots=True)
class _RenamedFamilies:
    """The same metrics once per prefix, with the label model_name, by which vLLM's dashboards select."""

    families: list[Metric]
    prefixes: tuple[str, ...]
    model: str

    def collect(self) -> Iterator[Metric]:
        for prefix in self.prefixes:
            for family in self.families:
                renamed = Metric(prefix + family.name.removeprefix(PREFIX), family.documentation, family.type)
                for sample in family.samples:
                    if not sample.name.endswith("_created"):  # a gauge per counter that nobody reads
                        labels = {"model_name": self.model, **sample.labels}
                        renamed.add_sample(prefix + sample.name.removeprefix(PREFIX), labels, sample.value)
                yield renamed
