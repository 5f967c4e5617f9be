"""Whether the world still is as the planner takes it: drift of forecast, model and actuation (R23.1).

Owns the three judgements, each a pure function of one tick's evidence with its own memory, and what
follows from them. Drift is entered when the evidence has been bad for a while and left when it has
been good for longer (hysteresis); evidence that is not known changes nothing. Hands the guard a stance:
while anything drifts, nothing shrinks and a measured overload is answered by one worker at a time, as
each comes up. Orders are no fewer for it: what is refused or lost is paced by its own back-off.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

KINDS = ("forecast", "model", "actuation")
COVERAGE_SLACK = 0.25
JUDGED_MIN = 30
OPTIMIST_MAX = 0.8
COUNT_MIN = 10
LOSSES_MIN = 3


@dataclass(frozen=True, slots=True)
class Evidence:
    """One pool in one tick; None is not known.

    Attributes:
        coverage, quantile: share of judged horizons below the bound, and the one that was promised;
            judged: how many.
        actual, predicted: latency over target as measured and as predicted; count: of samples.
        coming: whether workers are on their way, or leave: what was predicted is not there yet.
        losses: starts in a row that failed, were refused or never came. missing: workers that have
            been wanted and not been there for longer than any start takes.
    """

    coverage: float | None = None
    quantile: float = 0.9
    judged: int = 0
    actual: float | None = None
    predicted: float | None = None
    count: int = 0
    coming: bool = False
    losses: int = 0
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long evidence must last; seconds. `band`: by how much a target may be missed.

    `forecast_s`: what a burst does to the bound is learned by the forecast itself within minutes.
    """

    enter_s: float = 90.0
    forecast_s: float = 240.0
    leave_s: float = 120.0
    band: float = 0.1


@dataclass(frozen=True, slots=True)
class Watch:
    """One judgement of one pool over time. `entered`: how often it has been drift so far."""

    active: bool = False
    bad_since_s: float | None = None
    good_since_s: float | None = None
    entered: int = 0


@dataclass(frozen=True, slots=True)
class PoolDrift:
    """The three of one pool."""

    forecast: Watch = Watch()
    model: Watch = Watch()
    actuation: Watch = Watch()


@dataclass(frozen=True, slots=True)
class DriftMemory:
    """Of both pools; times are of the planner's monotonic clock."""

    prefill: PoolDrift = field(default_factory=PoolDrift)
    decode: PoolDrift = field(default_factory=PoolDrift)


@dataclass(frozen=True, slots=True)
class Stance:
    """What follows for one pool.

    Attributes:
        conservative: nothing shrinks, and a measured overload grows it one by one.
        reasons: (code, text) of each drift.
    """

    conservative: bool = False
    reasons: tuple[tuple[str, str], ...] = ()


def look(
    before: PoolDrift, evidence: Evidence, patience: Patience, *, now_s: float
) -> tuple[PoolDrift, Stance]:
    """The memory after this tick's evidence, and the stance that follows."""
    slower = replace(patience, enter_s=patience.forecast_s)
    after = PoolDrift(
        watch(before.forecast, forecast_is_off(evidence), slower, now_s=now_s),
        watch(before.model, model_is_off(evidence, patience.band), patience, now_s=now_s),
        watch(before.actuation, actuation_is_off(evidence), patience, now_s=now_s),
    )
    return after, _stance(after, evidence, now_s)


def forecast_is_off(evidence: Evidence) -> bool | None:
    """The bound holds much less often than it promises."""
    if evidence.coverage is None or evidence.judged < JUDGED_MIN:
        return None
    return evidence.coverage < evidence.quantile - COVERAGE_SLACK


def model_is_off(evidence: Evidence, band: float) -> bool | None:
    """Requests miss the target while the profiles say that all is well.

    The other way round costs GPUs and misses nothing: it is corrected slowly, and is no drift. While
    workers come or leave, what was predicted is not there yet.
    """
    actual, predicted = evidence.actual, evidence.predicted
    if actual is None or predicted is None or evidence.count < COUNT_MIN or evidence.coming:
        return None
    return actual > 1.0 + band and predicted < OPTIMIST_MAX


def actuation_is_off(evidence: Evidence) -> bool:
    """What is ordered does not come."""
    return evidence.losses >= LOSSES_MIN or evidence.missing > 0


def watch(before: Watch, bad: bool | None, patience: Patience, *, now_s: float) -> Watch:
    """Enter after `enter_s` of bad evidence, leave after `leave_s` of good; unknown waits."""
    if bad is None:
        return before
    if bad:
        since_s = now_s if before.bad_since_s is None else before.bad_since_s
        entered = not before.active and now_s - since_s >= patience.enter_s
        return Watch(before.active or entered, since_s, None, before.entered + entered)
    since_s = now_s if before.good_since_s is None else before.good_since_s
    over = before.active and now_s - since_s >= patience.leave_s
    return Watch(before.active and not over, None, since_s, before.entered)


def moved(memory: DriftMemory, by_s: float) -> DriftMemory:
    """The same memory on a clock that is ahead by that."""

    def at(one: Watch) -> Watch:
        bad, good = one.bad_since_s, one.good_since_s
        return replace(
            one,
            bad_since_s=None if bad is None else bad + by_s,
            good_since_s=None if good is None else good + by_s,
        )

    def of(pool: PoolDrift) -> PoolDrift:
        return PoolDrift(at(pool.forecast), at(pool.model), at(pool.actuation))

    return DriftMemory(of(memory.prefill), of(memory.decode))


def _stance(drift: PoolDrift, evidence: Evidence, now_s: float) -> Stance:
    said: list[tuple[str, str]] = []

    def lasted(one: Watch) -> str:
        since_s = one.bad_since_s
        return "recovering" if since_s is None else f"for {now_s - since_s:.0f} s"

    if drift.forecast.active:
        held = "unknown" if evidence.coverage is None else f"{evidence.coverage:.0%}"
        text = f"the bound held {held} of the time and promises {evidence.quantile:.0%}"
        said.append(("drift_forecast", f"{text}, {lasted(drift.forecast)}"))
    if drift.model.active:
        shown = [
            "unknown" if x is None else f"{x:.2f}" for x in (evidence.actual, evidence.predicted)
        ]
        text = f"measured load is {shown[0]}, the profile says {shown[1]}"
        said.append(("drift_model", f"{text}, {lasted(drift.model)}"))
    if drift.actuation.active:
        text = f"{evidence.losses} starts in a row lost, {evidence.missing} workers overdue"
        said.append(("drift_actuation", f"{text}, {lasted(drift.actuation)}"))
    if said:
        said.append(("fallback", "nothing is given up, and a measured overload adds one at a time"))
    return Stance(bool(said), tuple(said))
