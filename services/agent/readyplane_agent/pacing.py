"""How fast weights may leave a worker that serves, so that those it serves do not notice. Pure.

Owns the rate (R9.1): a token bucket whose rate is cut while the foreground suffers, grows again when
it is calm, and is zero (paused) where even the floor hurts. `transfer` spends the bytes and
`interference` brings the samples. Seconds on one monotonic clock, handed in.

What counts as suffering, each as a share of where it must not get to (`Foreground.pressure`):

- time to first token and time per output token against their targets, where there are targets;
- without a target, time per output token against itself while nothing was given (its baseline);
- seconds per byte of the link's KV transfers against their own baseline.

A baseline is learnt only while no weights go out, so a push cannot become its own excuse; and while
paused it is learnt anew, so that a worker which has simply become busier resumes. How far it scatters
is learnt with it: what scatters by itself is no sign.

A push begins slowly where somebody is served, and the rate that hurt last is approached only slowly
for a while: else each probing would cost the foreground what the pace is there to spare it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ServingTimes:
    """What an engine has measured of its requests since its start; None where it does not say.

    Sums in seconds (`kv_bytes_sum` in bytes) with their counts of observations.
    """

    ttft_sum_s: float | None = None
    ttft_count: float | None = None
    tpot_sum_s: float | None = None
    tpot_count: float | None = None
    kv_sum_s: float | None = None
    kv_bytes_sum: float | None = None


@dataclass(frozen=True, slots=True)
class Foreground:
    """How requests fared in one window; None where nothing was seen, which is never zero.

    `idle` says that the engine was asked and has served nobody.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    kv_s_per_byte: float | None = None
    idle: bool = False

    @property
    def serving(self) -> bool:
        """Whether somebody was seen being served."""
        return (self.ttft_s, self.tpot_s, self.kv_s_per_byte) != (None, None, None)


def between(before: ServingTimes, after: ServingTimes) -> Foreground:
    """Means of the window between two readings; an engine that began anew shows nothing."""
    return Foreground(
        _mean(before.ttft_sum_s, after.ttft_sum_s, before.ttft_count, after.ttft_count),
        _mean(before.tpot_sum_s, after.tpot_sum_s, before.tpot_count, after.tpot_count),
        _mean(before.kv_sum_s, after.kv_sum_s, before.kv_bytes_sum, after.kv_bytes_sum),
        idle=_unchanged(before, after),
    )


def _unchanged(before: ServingTimes, after: ServingTimes) -> bool:
    known = (before.ttft_count, before.tpot_count)
    return None not in known and known == (after.ttft_count, after.tpot_count)


def _mean(
    sum0: float | None, sum1: float | None, count0: float | None, count1: float | None
) -> float | None:
    if sum0 is None or sum1 is None or count0 is None or count1 is None:
        return None
    total, count = sum1 - sum0, count1 - count0
    return total / count if count > 0 and total >= 0 else None


@dataclass(frozen=True, slots=True)
class PacingPolicy:
    """Bounds of the rate.

    Attributes:
        ceiling_bytes_per_s: most that may ever leave; infinite for no bound.
        floor_bytes_per_s: less than this is not worth a connection: paused instead.
        first_bytes_per_s: where a push begins while somebody is served.
        ttft_target_s, tpot_target_s: what requests are promised; 0 where nothing is.
        near: a share of a target from which on the rate is cut. calm: below it the rate may grow;
            between the two it stays, so that it does not swing.
        slowed, steady: the same for a time against its own baseline; `scatter` times its usual
            scatter is added to both.
        cut, grow: factors a sample; grow_idle: while the engine serves nobody. calm_samples: calm windows in a row before the rate grows.
        pressed_samples: windows in a row in which a time is longer than usual before it is cut.
        shy: share of the rate that hurt last beyond which it grows by `creep` a sample only, for
            remember_s.
        pause_s: shortest pause; doubles with every pause that soon follows another, up to
        pause_max_s. elsewhere_s: paused for longer, readers are told to read elsewhere.
        weight: share of a new sample in a baseline.
        burst_s: seconds of the rate that may go at once; burst_bytes: at least this many bytes.
    """

    ceiling_bytes_per_s: float = math.inf
    floor_bytes_per_s: float = 4.0 * 2**20
    first_bytes_per_s: float = 32.0 * 2**20
    ttft_target_s: float = 0.0
    tpot_target_s: float = 0.0
    near: float = 0.95
    calm: float = 0.85
    slowed: float = 1.05
    steady: float = 1.02
    cut: float = 0.5
    grow: float = 1.5
    grow_idle: float = 4.0
    calm_samples: int = 2
    pressed_samples: int = 2
    scatter: float = 2.0
    shy: float = 0.7
    creep: float = 1.02
    remember_s: float = 60.0
    pause_s: float = 1.0
    pause_max_s: float = 8.0
    elsewhere_s: float = 5.0
    weight: float = 0.3
    burst_s: float = 0.05
    burst_bytes: float = 256.0 * 2**10

    @property
    def floor(self) -> float:
        """The floor in bytes per second, well below a low ceiling."""
        return min(self.floor_bytes_per_s, self.ceiling_bytes_per_s / 4)


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate now, the bucket, and what is remembered; a value that `observe` and `spend` renew.

    Attributes:
        bytes_per_s: the rate, 0 while paused. why: what set it.
        bucket_bytes, filled_s: bytes that may go (negative: promised already) as of when.
        paused_s: since when it is paused, None while it is not. pause_for_s: for how long.
        resumed_s: when the last pause ended. calm_samples, pressed_samples: windows in a row.
        tpot_s, kv_s_per_byte: baselines, None before any; tpot_scatter, kv_scatter: how far they
            scatter, as a share. serving: somebody was served in the last window that showed it.
        hurt_bytes_per_s, hurt_s: the rate that hurt last, and when; None before any.
    """

    bytes_per_s: float
    filled_s: float
    bucket_bytes: float = 0.0
    paused_s: float | None = None
    pause_for_s: float = 0.0
    resumed_s: float | None = None
    calm_samples: int = 0
    pressed_samples: int = 0
    tpot_s: float | None = None
    kv_s_per_byte: float | None = None
    tpot_scatter: float = 0.0
    kv_scatter: float = 0.0
    serving: bool = False
    hurt_bytes_per_s: float | None = None
    hurt_s: float = 0.0
    why: str = "nothing suffers"


def begin(policy: PacingPolicy, *, now_s: float) -> Pace:
    """A pace before any sample: the ceiling, since nothing is known to suffer."""
    return Pace(policy.ceiling_bytes_per_s, now_s, bucket_bytes=policy.burst_bytes)


def serve(pace: Pace, policy: PacingPolicy) -> Pace:
    """The worker begins to serve: until a sample says otherwise somebody is taken to be served."""
    first = max(policy.floor, policy.first_bytes_per_s)
    return replace(pace, serving=True, bytes_per_s=min(pace.bytes_per_s, first), calm_samples=0)


def observe(
    pace: Pace,
    seen: Foreground,
    policy: PacingPolicy,
    *,
    given_bytes_per_s: float,
    now_s: float,
) -> Pace:
    """The pace after one window.

    Args:
        given_bytes_per_s: what really went out in the window; 0 makes it a sample of the baseline.
    """
    pace = _begun(_filled(pace, policy, now_s), seen, policy, given_bytes_per_s)
    pressures = tuple(_pressures(pace, seen, policy))
    if given_bytes_per_s <= 0:
        pace = _learnt(pace, seen, policy)
    worst = max(pressures, key=lambda p: p.level, default=Pressure(0.0, "nothing suffers"))
    if pace.paused_s is not None:
        return _maybe_resumed(pace, worst, policy, now_s)
    if worst.level >= 1.0:
        if given_bytes_per_s <= 0:
            # It suffers although nothing goes out: no rate of ours would help, but none is added.
            return replace(pace, calm_samples=0, why=worst.why)
        sure = any(p.sure and p.level >= 1.0 for p in pressures)
        pressed = pace.pressed_samples + 1
        if not sure and pressed < policy.pressed_samples:
            return replace(pace, calm_samples=0, pressed_samples=pressed, why=worst.why)
        hurt = min(pace.bytes_per_s, given_bytes_per_s)
        pace = replace(pace, pressed_samples=0, hurt_bytes_per_s=hurt, hurt_s=now_s)
        return _slower(pace, hurt * policy.cut, worst, policy, now_s)
    pace = replace(pace, pressed_samples=0)
    if worst.level > 0.0:
        return replace(pace, calm_samples=0)
    calm = pace.calm_samples + 1
    # What was not used has shown nothing: the rate grows behind what really goes out.
    shown = given_bytes_per_s >= pace.bytes_per_s / 2 if pace.serving else True
    full = pace.bytes_per_s >= policy.ceiling_bytes_per_s
    unknown = pace.serving and not seen.serving
    if calm < policy.calm_samples or full or unknown or not shown:
        return replace(pace, calm_samples=calm)
    rate = pace.bytes_per_s * policy.grow_idle if seen.idle else _grown(pace, policy, now_s)
    rate = min(policy.ceiling_bytes_per_s, rate)
    return replace(
        pace, calm_samples=calm, bytes_per_s=rate if rate < 1e13 else math.inf, why=worst.why
    )


def _begun(pace: Pace, seen: Foreground, policy: PacingPolicy, given_bytes_per_s: float) -> Pace:
    """Begin slowly as soon as somebody is served, and again with every push."""
    if not seen.serving:
        return replace(pace, serving=False) if seen.idle else pace
    if pace.serving and given_bytes_per_s > 0:
        return pace
    return serve(pace, policy)


def _grown(pace: Pace, policy: PacingPolicy, now_s: float) -> float:
    rate, hurt = pace.bytes_per_s, pace.hurt_bytes_per_s
    grown = rate * policy.grow
    if hurt is None or now_s - pace.hurt_s > policy.remember_s:
        return grown
    return max(rate * policy.creep, min(grown, hurt * policy.shy))


@dataclass(frozen=True, slots=True)
class Pressure:
    """One sign: at 1 and above the rate is cut, at 0 it may grow, between the two it stays.

    A promise that is nearly broken is `sure`; a time that is longer than usual has to be so again.
    """

    level: float
    why: str
    sure: bool = False


def _pressures(pace: Pace, seen: Foreground, policy: PacingPolicy) -> Iterable[Pressure]:
    for name, value, target in (
        ("time to first token", seen.ttft_s, policy.ttft_target_s),
        ("time per output token", seen.tpot_s, policy.tpot_target_s),
    ):
        if value is not None and target > 0:
            level = _level(value / target, policy.calm, policy.near)
            why = f"{name} {value * 1e3:.1f} ms of {target * 1e3:.1f} ms promised"
            yield Pressure(level, why, sure=True)
    untold = policy.tpot_target_s <= 0
    for name, value, baseline, scatter in (
        ("time per output token", seen.tpot_s if untold else None, pace.tpot_s, pace.tpot_scatter),
        ("KV transfer time", seen.kv_s_per_byte, pace.kv_s_per_byte, pace.kv_scatter),
    ):
        if value is not None and baseline:
            usual = policy.scatter * scatter
            level = _level(value / baseline, policy.steady + usual, policy.slowed + usual)
            yield Pressure(level, f"{name} is {value / baseline:.2f} of what it is without")


def slo_share(seen: Foreground, policy: PacingPolicy) -> float | None:
    """The larger of TTFT and TPOT as a share of its target; None where neither is known."""
    shares = [
        value / target
        for value, target in (
            (seen.ttft_s, policy.ttft_target_s),
            (seen.tpot_s, policy.tpot_target_s),
        )
        if value is not None and target > 0
    ]
    return max(shares, default=None)


def _level(ratio: float, low: float, high: float) -> float:
    return max(0.0, (ratio - low) / (high - low))


def _learnt(pace: Pace, seen: Foreground, policy: PacingPolicy) -> Pace:
    return replace(
        pace,
        tpot_s=_mixed(pace.tpot_s, seen.tpot_s, policy.weight),
        kv_s_per_byte=_mixed(pace.kv_s_per_byte, seen.kv_s_per_byte, policy.weight),
        tpot_scatter=_scattered(pace.tpot_scatter, pace.tpot_s, seen.tpot_s, policy.weight),
        kv_scatter=_scattered(
            pace.kv_scatter, pace.kv_s_per_byte, seen.kv_s_per_byte, policy.weight
        ),
    )


def _scattered(known: float, baseline: float | None, sample: float | None, weight: float) -> float:
    """Mean distance of samples from their baseline, as a share of it; 1 at most."""
    if sample is None or not baseline:
        return known
    return known + weight * (min(1.0, abs(sample - baseline) / baseline) - known)


def _mixed(known: float | None, sample: float | None, weight: float) -> float | None:
    if sample is None or known is None:
        return known if sample is None else sample
    return known + weight * (sample - known)


def _slower(pace: Pace, rate: float, worst: Pressure, policy: PacingPolicy, now_s: float) -> Pace:
    if rate >= policy.floor:
        return replace(pace, bytes_per_s=rate, calm_samples=0, why=worst.why)
    again = pace.resumed_s is not None and now_s - pace.resumed_s < 2 * policy.pause_max_s
    pause_s = min(policy.pause_max_s, pace.pause_for_s * 2) if again else policy.pause_s
    return replace(
        pace,
        bytes_per_s=0.0,
        bucket_bytes=min(0.0, pace.bucket_bytes),
        paused_s=now_s,
        pause_for_s=pause_s,
        calm_samples=0,
        why=worst.why,
    )


def _maybe_resumed(pace: Pace, worst: Pressure, policy: PacingPolicy, now_s: float) -> Pace:
    assert pace.paused_s is not None
    if worst.level >= 1.0 or now_s - pace.paused_s < pace.pause_for_s:
        return replace(pace, why=worst.why if worst.level >= 1.0 else pace.why)
    return replace(
        pace,
        bytes_per_s=policy.floor,
        paused_s=None,
        resumed_s=now_s,
        filled_s=now_s,
        why="resumed",
    )


def _filled(pace: Pace, policy: PacingPolicy, now_s: float) -> Pace:
    passed_s = max(0.0, now_s - pace.filled_s)
    if math.isinf(pace.bytes_per_s):
        return replace(pace, bucket_bytes=burst(pace, policy), filled_s=now_s)
    filled = min(burst(pace, policy), pace.bucket_bytes + pace.bytes_per_s * passed_s)
    return replace(pace, bucket_bytes=max(filled, min(0.0, pace.bucket_bytes)), filled_s=now_s)


def burst(pace: Pace, policy: PacingPolicy) -> float:
    """Most bytes that may go at once at this rate."""
    if math.isinf(pace.bytes_per_s):
        return policy.burst_bytes
    return max(policy.burst_bytes, pace.bytes_per_s * policy.burst_s)


def spend(pace: Pace, size_bytes: int, policy: PacingPolicy, *, now_s: float) -> tuple[Pace, float]:
    """Promise `size_bytes`; returns the pace and the seconds to wait before they may go.

    Infinite seconds while paused; nothing is promised then. In any window no more than its seconds
    times the rate, one burst and one promise go out.
    """
    if math.isinf(pace.bytes_per_s):
        return pace, 0.0
    if pace.bytes_per_s <= 0:
        return pace, math.inf
    pace = _filled(pace, policy, now_s)
    left = pace.bucket_bytes - size_bytes
    return replace(pace, bucket_bytes=left), max(0.0, -left / pace.bytes_per_s)


def elsewhere(pace: Pace, policy: PacingPolicy, *, now_s: float) -> bool:
    """Whether the pause has lasted so long that readers are better off with another source."""
    return pace.paused_s is not None and now_s - pace.paused_s > policy.elsewhere_s
