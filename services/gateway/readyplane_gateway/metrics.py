"""The gateway's metrics, by name; written by the flow from what came of a request.

Owns names, labels and buckets. `model` is a label only for models that the fleet or the registry
knows, anything else counts under `other` (B159).
"""

from __future__ import annotations

from readyplane.kit.telemetry import Metrics

OTHER = "other"
_LEG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_TPOT_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 1)


class Meters:
    """Every family of the gateway, on one registry."""

    def __init__(self, metrics: Metrics) -> None:
        name = "readyplane_gateway_"
        self.requests = metrics.counter(
            name + "requests_total",
            "Requests answered, by class of the HTTP status (stream_error: ended by an error chunk)",
            ("code_class", "model"),
        )
        self.ttft = metrics.histogram(
            name + "ttft_seconds", "Arrival to first token sent to the client", ("model",)
        )
        self.tpot = metrics.histogram(
            name + "tpot_seconds",
            "Mean time per later token of a finished stream",
            ("model",),
            buckets=_TPOT_BUCKETS,
        )
        self.leg = metrics.histogram(
            name + "leg_seconds", "Duration of a leg", ("leg", "outcome"), buckets=_LEG_BUCKETS
        )
        self.handovers = metrics.counter(
            name + "handovers_total",
            "Prefill legs that ended: handed_over, local (one worker), missing (no KV parameters)",
            ("kind",),
        )
        self.abandoned = metrics.counter(
            name + "kv_abandoned_total",
            "KV that a prefill engine may hold for a request that ended, by what became of it",
            ("how",),
        )
        self.repairs = metrics.counter(
            name + "repairs_total", "Pairs replaced after a failed leg", ("leg", "trouble")
        )
        self.moves = metrics.counter(
            name + "moves_total",
            "Requests to be moved from a worker that drains: moved, no_room (elsewhere), refused (by "
            "its engine), repaired (prefilled anew after the other engine failed)",
            ("outcome",),
        )
        self.aborted = metrics.counter(
            name + "aborted_total", "Requests whose client left before the end", ("stage",)
        )
        self.in_flight = metrics.gauge(name + "requests_in_flight", "Requests under way").labels()
        self.output_tokens = metrics.counter(
            name + "output_tokens_total", "Output tokens of finished requests", ("model",)
        )
        self.events_buffered = metrics.gauge(
            name + "events_buffered", "Facts not yet told to the router"
        ).labels()
        self.events_dropped = metrics.counter(
            name + "events_dropped_total", "Facts dropped because the router was away for too long"
        ).labels()
        self.events_unknown = metrics.counter(
            name + "events_unknown_total", "Facts about reservations that the router does not know"
        ).labels()
        self.router_waits = metrics.counter(
            name + "router_retries_total", "Calls of the router that had to be repeated", ("call",)
        )
        self.tokenized = metrics.counter(
            name + "tokenized_total", "Prompts by how their tokens came", ("how",)
        )
        self.parity = metrics.counter(
            name + "tokenizer_parity_total",
            "Prompts whose tokens by the tokenizer kept here were compared with an engine's",
            ("outcome",),
        )
