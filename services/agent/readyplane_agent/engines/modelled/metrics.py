"""vLLM's metrics by vLLM's names, as Prometheus text, written by hand.

Owns the histograms and the page; the counters come from the model's own statistics. Importing a
metrics library would cost each start more than this file is long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

from readyplane_agent.engines.modelled.core_events import EngineStats

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_XFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = (2e3, 1e5, 1e6, 5e6, 1e7, 5e7, 1e8, 5e8, 1e9, 5e9)
LATENESS_WINDOW = 4096

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "vllm:time_to_first_token_seconds": (*_SECONDS, 10.0, 20.0, 40.0, 80.0, 160.0),
    "vllm:inter_token_latency_seconds": _ITL,
    "vllm:request_time_per_output_token_seconds": _ITL,
    "vllm:e2e_request_latency_seconds": _LONG,
    "vllm:request_queue_time_seconds": _LONG,
    "vllm:request_prefill_time_seconds": _LONG,
    "vllm:request_decode_time_seconds": _LONG,
    "vllm:request_inference_time_seconds": _LONG,
    "vllm:request_prompt_tokens": _TOKENS,
    "vllm:request_generation_tokens": _TOKENS,
    "vllm:iteration_tokens_total": _ITERATION,
    "vllm:nixl_xfer_time_seconds": _XFER,
    "vllm:nixl_post_time_seconds": _XFER,
    "vllm:nixl_bytes_transferred": _BYTES,
    "vllm:nixl_num_descriptors": _TOKENS,
}


class Histogram:
    """Counts of observations, cumulative on the page."""

    __slots__ = ("_edges", "counts", "total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self._edges, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        """Samples in the text format."""
        out, seen = [], 0
        for edge, count in zip(self._edges, self.counts, strict=False):
            seen += count
            out.append(f'{name}_bucket{{{labels},le="{edge:g}"}} {seen}')
        seen += self.counts[-1]
        out.append(f'{name}_bucket{{{labels},le="+Inf"}} {seen}')
        out.append(f"{name}_sum{{{labels}}} {self.total:.9g}")
        out.append(f"{name}_count{{{labels}}} {seen}")
        return out


class EngineMetrics:
    """All that is not a statistic of the model itself."""

    def __init__(self, model: str) -> None:
        self._labels = f'model_name="{_escaped(model)}",engine="0"'
        self._histograms = {name: Histogram(edges) for name, edges in HISTOGRAMS.items()}
        self._success: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._lateness: deque[float] = deque(maxlen=LATENESS_WINDOW)
        self._lateness_count, self._lateness_sum = 0, 0.0
        self._last = (0, 0)
        self.failed_transfers = 0
        self.failed_notifications = 0
        self.abandoned = 0
        self.external_queries = 0
        self.external_hits = 0

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """One observation of the histogram `vllm:<name>`."""
        self._histograms["vllm:" + name].observe(value, times)

    def finished(self, reason: str) -> None:
        """One request is over."""
        self._success[reason] = self._success.get(reason, 0) + 1

    def late(self, seconds: float) -> None:
        """Tokens went out `seconds` after the model's time for them."""
        self._lateness.append(seconds)
        self._lateness_count += 1
        self._lateness_sum += seconds

    def lateness_s(self, quantile: float) -> float:
        """Quantile of the last `LATENESS_WINDOW` samples, 0 without any."""
        if not self._lateness:
            return 0.0
        values = sorted(self._lateness)
        return values[round(quantile * (len(values) - 1))]

    def page(self, stats: EngineStats, *, cache_config: Mapping[str, object]) -> bytes:
        """The metrics page."""
        self._iterations(stats)
        labels = self._labels
        out: list[str] = []
        for name, kind, text, value in _samples(stats):
            out += _head(name, kind, text)
            out.append(f"{name}{{{labels}}} {value:.9g}")
        for name, text, count in (
            ("vllm:nixl_num_failed_transfers_total", "KV loads that failed", self.failed_transfers),
            (
                "vllm:nixl_num_failed_notifications_total",
                "notifications that failed",
                self.failed_notifications,
            ),
            (
                "readyplane_engine_kv_abandoned_total",
                "held KV that was given back because nobody would read it",
                self.abandoned,
            ),
            ("vllm:external_prefix_cache_queries_total", "tokens asked", self.external_queries),
            ("vllm:external_prefix_cache_hits_total", "tokens brought", self.external_hits),
        ):
            out += _head(name, "counter", text)
            out.append(f"{name}{{{labels}}} {count}")
        out += _head("vllm:request_success_total", "counter", "finished requests")
        out += [
            f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
            for reason, count in sorted(self._success.items())
        ]
        out += _head("vllm:cache_config_info", "gauge", "cache configuration")
        config = ",".join(f'{k}="{_escaped(str(v))}"' for k, v in cache_config.items())
        out.append(f'vllm:cache_config_info{{{config},engine="0"}} 1')
        for name, histogram in self._histograms.items():
            out += _head(name, "histogram", name.partition(":")[2].replace("_", " "))
            out += histogram.lines(name, labels)
        out += self._lateness_lines()
        return ("\n".join(out) + "\n").encode()

    def _iterations(self, stats: EngineStats) -> None:
        """Iterations since the last page, as observations of their mean token count."""
        tokens = stats.computed_tokens_total + stats.generated_tokens_total
        steps = stats.iterations_total - self._last[0]
        if steps > 0:
            mean = (tokens - self._last[1]) / steps
            self._histograms["vllm:iteration_tokens_total"].observe(mean, steps)
            self._last = (stats.iterations_total, tokens)

    def _lateness_lines(self) -> list[str]:
        name = "readyplane_engine_lateness_seconds"
        out = _head(name, "summary", "how late tokens go out, against the model's time for them")
        for quantile in (0.5, 0.9, 0.99):
            value = self.lateness_s(quantile)
            out.append(f'{name}{{{self._labels},quantile="{quantile:g}"}} {value:.6g}')
        out.append(f"{name}_sum{{{self._labels}}} {self._lateness_sum:.6g}")
        out.append(f"{name}_count{{{self._labels}}} {self._lateness_count}")
        return out


def _samples(stats: EngineStats) -> tuple[tuple[str, str, str, float], ...]:
    used = stats.kv_used_blocks / stats.kv_total_blocks
    gauge, counter = "gauge", "counter"
    ours = "readyplane_engine_"
    waiting = stats.waiting + stats.loading  # vLLM: a load is a kind of waiting
    return (
        ("vllm:num_requests_running", gauge, "requests in the batch", stats.running),
        ("vllm:num_requests_waiting", gauge, "requests not yet in it", waiting),
        ("vllm:kv_cache_usage_perc", gauge, "share of KV blocks in use, 0 to 1", used),
        ("vllm:prompt_tokens_total", counter, "prompt tokens", stats.prompt_tokens_total),
        ("vllm:generation_tokens_total", counter, "output tokens", stats.generated_tokens_total),
        ("vllm:prefix_cache_queries_total", counter, "tokens asked", stats.queried_tokens_total),
        ("vllm:prefix_cache_hits_total", counter, "tokens found", stats.cached_tokens_total),
        ("vllm:num_preemptions_total", counter, "preemptions", stats.preemptions_total),
        (
            "vllm:nixl_num_kv_expired_reqs_total",
            counter,
            "held KV that nobody read in time",
            stats.kv_expired_total,
        ),
        (f"{ours}iterations_total", counter, "engine steps", stats.iterations_total),
        (f"{ours}held_requests", gauge, "KV held for a reader", stats.held),
        (
            f"{ours}waiting_prefill_tokens",
            gauge,
            "prompt tokens not yet computed",
            stats.waiting_prefill_tokens,
        ),
        (f"{ours}kv_used_blocks", gauge, "KV blocks in use", stats.kv_used_blocks),
        (f"{ours}kv_cached_blocks", gauge, "idle blocks with a prefix", stats.kv_cached_blocks),
    )


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
