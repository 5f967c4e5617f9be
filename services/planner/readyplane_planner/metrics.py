"""What Prometheus sees of the planner, by the names of R24.1; written from values of one tick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from readyplane.kit.telemetry import Metrics
from readyplane_planner.decide import POOLS, Decision, Memory, Plan
from readyplane_planner.decide.drift import KINDS
from readyplane_planner.rollout import Phase
from readyplane_planner.signals import ROUTERS, Kind
from readyplane_planner.state import Seen

LABELS = ("pool", "worker_class", "model")


class PlannerMetrics:
    """The planner's families in a registry."""

    def __init__(self, registry: Metrics) -> None:
        gauge, counter = registry.gauge, registry.counter
        self._desired = gauge("readyplane_desired_replicas", "Workers wanted", LABELS)
        self._provisioned = gauge(
            "readyplane_provisioned_replicas", "Workers that hold their resources", LABELS
        )
        self._ready = gauge("readyplane_ready_replicas", "Workers that passed the gate", LABELS)
        self._draining = gauge("readyplane_draining_replicas", "Workers that drain", LABELS)
        self._gap = gauge(
            "readyplane_desired_ready_gap_tokens_per_second", "Rate wanted and not ready", LABELS
        )
        self._rates = {
            f"{what}_rate": gauge(f"readyplane_{what}_tokens_per_second", text, LABELS)
            for what, text in (
                ("desired", "Service rate of the workers wanted"),
                ("provisioned", "Service rate of the workers that hold their resources"),
                ("ready", "Service rate of the ready workers"),
            )
        }
        self._target = gauge(
            "readyplane_slo_target_seconds", "Target of the pool's latency: TTFT, TPOT", LABELS
        )
        self._load = gauge("readyplane_load_ratio", "Latency over target", LABELS)
        self._forecast = gauge(
            "readyplane_forecast_tokens_per_second",
            "Demand over the coming T_ready",
            (*LABELS, "bound"),
        )
        self._coverage = gauge(
            "readyplane_forecast_coverage_ratio", "Share of horizons below the bound", LABELS
        )
        self._pinball = gauge(
            "readyplane_forecast_pinball_loss",
            "Mean pinball loss of the bound, as a share of the demand",
            LABELS,
        )
        self._t_ready = gauge("readyplane_t_ready_seconds", "Order to ready", (*LABELS, "quantile"))
        self._predicted = {
            "prefill": gauge("readyplane_ttft_predicted_seconds", "Predicted TTFT", LABELS),
            "decode": gauge("readyplane_tpot_predicted_seconds", "Predicted TPOT", LABELS),
        }
        self._actual = {
            "prefill": gauge("readyplane_ttft_actual_seconds", "P90 of TTFT", LABELS),
            "decode": gauge("readyplane_tpot_actual_seconds", "P90 of TPOT", LABELS),
        }
        self._queue = gauge(
            "readyplane_prefill_queue_tokens", "Prompt tokens waiting to be computed", LABELS
        )
        self._active = gauge(
            "readyplane_decode_active_sequences", "Sequences assigned to decode workers", LABELS
        )
        self._kv = gauge("readyplane_kv_usage_ratio", "Share of KV blocks in use", LABELS)
        self._reversals = gauge("readyplane_target_reversals", "Changes of direction", LABELS)
        self._correction = gauge(
            "readyplane_service_rate_correction_ratio", "Measured over profiled rate", LABELS
        )
        self._phase = gauge(
            "readyplane_rollout_phase",
            "1 for the phase that the roll-out is in",
            ("model", "phase"),
        )
        self._decisions = counter(
            "readyplane_decisions", "Decisions by what they did", ("model", "kind")
        )
        self._overrides = counter(
            "readyplane_guard_overrides", "Targets that a guard rule changed", ("model", "rule")
        )
        self._age = gauge(
            "readyplane_signal_age_seconds",
            "Age of each signal; absent if not known",
            ("model", "signal"),
        )
        self._unknown = gauge(
            "readyplane_signal_unknown", "1 while a signal is missing or stale", ("model", "signal")
        )
        self._silent = gauge(
            "readyplane_sources_silent", "Sources beyond the router without an answer", ("model",)
        )
        self._bad = gauge("readyplane_bad_samples", "Samples refused so far", ("model",))
        self._fallbacks = gauge(
            "readyplane_optimiser_fallbacks", "Ticks decided without the optimiser", ("model",)
        )
        self._drift = gauge(
            "readyplane_drift",
            "1 while forecast, model or actuation drifts",
            ("model", "pool", "kind"),
        )
        self._dead_ends = gauge(
            "readyplane_dead_ends",
            "Artifacts of which nothing is ordered, for their starts ended for good",
            ("model", "pool"),
        )
        self._standby = counter(
            "readyplane_standby_gpu_seconds",
            "GPU-seconds of standbys that waited, by what they held",
            (*LABELS, "holds"),
        )
        self._stood: dict[tuple[str, str], float] = {}
        self._leader = gauge("readyplane_planner_leading", "1 while this planner acts", ("model",))
        self._calls = counter(
            "readyplane_actuations", "Calls to actuator and router by outcome", ("model", "outcome")
        )
        self._tick = registry.histogram(
            "readyplane_planner_tick_seconds", "Time of one tick, waiting included", ("model",)
        )
        self._rules: dict[str, int] = {}

    def tick(
        self,
        seen: Seen,
        pools: Mapping[str, Mapping[str, Any]],
        memory: Memory,
        *,
        leading: bool,
        took_s: float,
    ) -> None:
        """Write one tick; `pools` is that part of its state document."""
        plan = seen.plan
        for name in POOLS:
            self._pool(name, seen, pools[name], memory, plan, leading=leading)
        model, decision = plan.model, seen.decision
        for kind, happened in (
            ("order", bool(decision.orders)),
            ("drain", bool(decision.drains)),
            ("release", bool(decision.releases)),
            ("hold", not decision.changed),
        ):
            if happened and leading:
                self._decisions.labels(model, kind).inc()
        for rule, count in memory.overrides.items():
            grown = count - self._rules.get(rule, 0)
            if grown > 0:
                self._overrides.labels(model, rule).inc(grown)
            self._rules[rule] = count
        self._signals(model, decision, begun=memory.work_p.begun_s is not None)
        self._silent.labels(model).set(len(seen.observation.silent))
        self._bad.labels(model).set(memory.bad_samples)
        self._fallbacks.labels(model).set(memory.fallbacks)
        for name, drift in (("prefill", memory.drift.prefill), ("decode", memory.drift.decode)):
            for kind in KINDS:
                self._drift.labels(model, name, kind).set(getattr(drift, kind).active)
        for name in POOLS:
            ended = sum(d.pool == name and not d.standby for d in decision.dead_ends)
            self._dead_ends.labels(model, name).set(ended if leading else 0)
        self._leader.labels(model).set(1 if leading else 0)
        for phase in Phase:
            self._phase.labels(model, str(phase)).set(leading and decision.rollout.phase is phase)
        self._tick.labels(model).observe(took_s)

    def _signals(self, model: str, decision: Decision, *, begun: bool) -> None:
        """`begun`: there was a request of this model."""
        for signal, age_s in decision.signal_ages_s.items():
            if age_s is None:
                self._age.forget(model=model, signal=signal)
            else:
                self._age.labels(model, signal).set(age_s)
        for name, told in decision.signals.items():
            # Warming up is part of every start, and so is a model that nobody has asked for yet.
            unasked = not begun and "without this model" in told.why
            away = told.kind in (Kind.MISSING, Kind.STALE) and not unasked
            self._unknown.labels(model, name).set(1 if away else 0)
        if ROUTERS not in decision.signals:  # told only while some are not heard
            self._unknown.forget(model=model, signal=ROUTERS)

    def stood(self, plan: Plan, seconds: Mapping[tuple[str, str], float]) -> None:
        """What standbys have cost so far, by (pool, holds)."""
        for key, so_far_s in seconds.items():
            grown_s = so_far_s - self._stood.get(key, 0.0)
            if grown_s > 0.0:
                labels = (key[0], plan.pool(key[0]).worker_class, plan.model, key[1])
                self._standby.labels(*labels).inc(grown_s)
            self._stood[key] = so_far_s

    def call(self, model: str, outcome: str) -> None:
        """Count one finished call."""
        self._calls.labels(model, outcome).inc()

    def _pool(
        self,
        name: str,
        seen: Seen,
        row: Mapping[str, Any],
        memory: Memory,
        plan: Plan,
        *,
        leading: bool,
    ) -> None:
        pool = seen.decision.pool(name)
        labels = (name, plan.pool(name).worker_class, plan.model)
        known = {
            self._desired: row["desired"],
            self._provisioned: row["provisioned"],
            self._ready: row["ready"],
            self._draining: row["draining"],
            self._gap: row["gap_rate"],
            self._target: row["target_s"],
            **{family: row[rate] for rate, family in self._rates.items()},
            self._load: row["load"],
            self._predicted[name]: row["predicted_s"],
            self._actual[name]: row["actual_s"],
            self._kv: row["kv_usage"],
            self._coverage: pool.forecast.coverage,
            self._pinball: pool.forecast.pinball if pool.forecast.judged else None,
            self._reversals: memory.guard(name).reversals,
            self._correction: pool.correction,
        }
        known[self._queue if name == "prefill" else self._active] = (
            row["queue_tokens"] if name == "prefill" else row["active"]
        )
        if not leading:
            # Whoever stands by has targets of no meaning; the leader's are told by the leader.
            targets = (self._desired, self._rates["desired_rate"], self._gap, self._reversals)
            known.update(dict.fromkeys(targets))
        for family, value in known.items():
            if value is None:
                family.forget(pool=name, model=plan.model)
            else:
                family.labels(*labels).set(value)
        for bound, value in (("level", pool.forecast.level), ("upper", pool.forecast.upper)):
            self._forecast.labels(*labels, bound).set(value)
        for quantile in ("p50", "p90", "p99"):
            self._t_ready.labels(*labels, quantile).set(getattr(pool.t_ready, f"{quantile}_s"))
