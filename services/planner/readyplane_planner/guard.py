"""Hard limits before a target is taken and safety after it; the optimiser cannot get past (R23).

Owns bounds, steps, cooldowns, hysteresis, minimum times, limits of the desired/ready gap, back-off
of failing starts, and the conservative controller that stands in for a failed optimiser. Hands a
Verdict a pool to decide: the target, and how many workers may be ordered or given up right now.

The floor is always enforced, whatever is not known (B12). Unknown or partial data may grow a pool,
never shrink it (B02, B05). Paused means: a person decides; nothing is ordered and nothing drained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

WANTS_MAX = 600
BACKOFF_DOUBLINGS_MAX = 6
TURNS_REMEMBERED = 8
TURNS_MAX = 16
DOUBLINGS_MAX = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one pool; seconds and workers.

    Attributes:
        step_up, step_down: most workers ordered or given up in one decision.
        window_s: shrinking follows the largest want of that window (B33).
        hold_s: surplus must have lasted that long (ski rental: about T_ready + T_drain); None
            until the caller has measured that.
        up_hold_s: what eats only into the headroom must have lasted that long before it grows.
        turn_s: there and back again, each sooner than that after the change before, is a reversal:
            it costs a start and a drain and serves nobody; 0 for none.
        pending_max: most workers on their way at once. gpus: of one worker, on all of its nodes; 0
            for not known.
        backoff_s: first pause after a failed or refused start; doubles, bounded.
    """

    low: int
    high: int
    step_up: int = 2
    step_down: int = 1
    up_cooldown_s: float = 10.0
    down_cooldown_s: float = 60.0
    window_s: float = 60.0
    hold_s: float | None = 60.0
    up_hold_s: float = 0.0
    turn_s: float = 0.0
    pending_max: int = 4
    gpus: int = 1
    backoff_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Counts:
    """A pool as it is: ready, on their way in time, draining, lost on the way; workers.

    `standby`: proved or loading, not to serve before they are activated: they occupy GPUs only.
    `backlog` is True while more waits than the target leaves room for (B23); `breach` while the
    ready workers alone miss the target beyond the band at the expected demand.
    """

    ready: int
    pending: int
    draining: int = 0
    expired: int = 0
    backlog: bool = False
    breach: bool = False
    standby: int = 0

    @property
    def live(self) -> int:
        """Ready and arriving workers."""
        return self.ready + self.pending

    @property
    def held(self) -> int:
        """Workers that occupy GPUs, the draining, the overdue and the standbys too."""
        return self.ready + self.pending + self.draining + self.expired + self.standby


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What the guard remembers of one pool; times are of the planner's monotonic clock.

    Attributes:
        desired: the last target. up_s, down_s: last order, last drain or cancelled start.
        surplus_since_s, deficit_since_s: since when it has been too large or too small.
        direction, moved_s: of the last change of the target. leg_s: how long the direction before
            that one had rested when it was left. turns_s: recent reversals. reversals: all of them.
    """

    desired: int | None = None
    up_s: float | None = None
    down_s: float | None = None
    surplus_since_s: float | None = None
    deficit_since_s: float | None = None
    wants: tuple[tuple[float, int], ...] = ()
    failures: int = 0
    retry_s: float = 0.0
    direction: int = 0
    moved_s: float | None = None
    leg_s: float | None = None
    turns_s: tuple[float, ...] = ()
    reversals: int = 0


@dataclass(frozen=True, slots=True)
class Trust:
    """What the data allows. `why` names the signals or services that are not known."""

    grow: bool = True
    shrink: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target, what may be done now, and every rule that spoke: (code, text)."""

    target: int
    grow: int = 0
    shrink: int = 0
    reasons: tuple[tuple[str, str], ...] = ()


def judge(
    *,
    wanted: int | None,
    keep: int | None,
    counts: Counts,
    memory: PoolMemory,
    limits: Limits,
    trust: Trust,
    paused: bool,
    now_s: float,
    urgent: int | None = None,
    shut: tuple[float, str] = (0.0, ""),
) -> tuple[Verdict, PoolMemory]:
    """Judge one pool.

    Args:
        wanted: workers to grow to, None when the optimiser knows nothing. keep: workers below
            which nothing may shrink (wanted with the hysteresis band), None likewise.
        urgent: of the wanted, those needed even without headroom; None for all.
        shut: until when nothing on offer can be ordered, and why.
    """
    live = counts.live
    memory = _looked(memory, wanted, keep, live, limits, now_s)
    if paused:
        held = live if memory.desired is None else memory.desired
        return Verdict(held, reasons=(("paused", "a person holds the targets"),)), memory
    reasons: list[tuple[str, str]] = []
    target, more, waits = live, wanted is not None and wanted > live, False
    if wanted is None or keep is None:
        reasons.append(("hold", trust.why or "demand is not known"))
        if memory.desired is not None and trust.grow:
            # Not knowing refutes nothing: what was wanted stays wanted, and what is lost meanwhile
            # is replaced (B02).
            target = max(live, min(memory.desired, limits.high))
            if live < limits.low <= target:
                reasons.append(_floor(live, limits))
    elif wanted > live:
        at_once = wanted if urgent is None else urgent
        target = _up(wanted, at_once, counts, memory, limits, trust, now_s, reasons)
        waits = _cools(memory, limits, now_s)
    elif keep < live:
        target = _down(counts, memory, limits, trust, now_s, reasons)
    if more and memory.desired is not None and (waits or now_s < max(memory.retry_s, shut[0])):
        # Nothing can be ordered now: what was wanted stays wanted. A target that followed every
        # want, or fell to what is left after a refusal, would turn while nothing can be had.
        target = max(live, min(memory.desired, limits.high))
    verdict = _bounded(target, counts, memory, limits, trust, now_s, reasons, shut, more=more)
    if waits and verdict.grow > max(0, limits.low - live):
        verdict = replace(verdict, grow=max(0, limits.low - live))
    return verdict, memory


def _cools(memory: PoolMemory, limits: Limits, now_s: float) -> bool:
    return memory.up_s is not None and now_s - memory.up_s < limits.up_cooldown_s


def _up(
    wanted: int,
    urgent: int,
    counts: Counts,
    memory: PoolMemory,
    limits: Limits,
    trust: Trust,
    now_s: float,
    reasons: list[tuple[str, str]],
) -> int:
    live = counts.live
    if not trust.grow:
        reasons.append(("hold", trust.why))
        return live
    code, hold_s = "", 0.0
    if urgent <= live:
        code, hold_s = "hold_headroom", limits.up_hold_s
    if _turns_early(memory, 1, limits, now_s) and (limits.hold_s or 0.0) > hold_s:
        code, hold_s = "hold_turn", limits.hold_s or 0.0
    if not counts.breach and _lasted_s(memory.deficit_since_s, now_s) < hold_s:
        # What was lost is replaced at once; only more than there was has to wait.
        lost = max(0, (memory.desired or 0) - live)
        if not lost:
            reasons.append(_held(code, memory.deficit_since_s, hold_s, now_s))
            return live
        wanted = min(wanted, live + lost)
    if memory.up_s is not None and _cools(memory, limits, now_s):
        left_s = limits.up_cooldown_s - (now_s - memory.up_s)
        reasons.append(("cooldown_up", f"next growth in {left_s:.1f} s"))
        return live
    target = wanted
    if target > live + limits.step_up:
        target = live + limits.step_up
        reasons.append(("max_step", f"wanted {wanted}, a step adds {limits.step_up} at most"))
    room = max(0, limits.pending_max - counts.pending)
    if target > live + room:
        target = live + room
        reasons.append(
            (
                "gap_limit",
                f"{counts.pending} of at most {limits.pending_max} workers are on their way already",
            )
        )
    return target


def _down(
    counts: Counts,
    memory: PoolMemory,
    limits: Limits,
    trust: Trust,
    now_s: float,
    reasons: list[tuple[str, str]],
) -> int:
    live = counts.live
    if not trust.shrink:
        reasons.append(("partial_data", trust.why))
        return live
    if counts.backlog:
        reasons.append(("backlog", "a queue is still being worked off"))
        return live
    hold_s = hold_down_s(memory, limits, now_s)
    if _lasted_s(memory.surplus_since_s, now_s) < hold_s:
        reasons.append(_held("hold_idle", memory.surplus_since_s, hold_s, now_s))
        return live
    changes = [t for t in (memory.up_s, memory.down_s) if t is not None]
    if changes and now_s - max(changes) < limits.down_cooldown_s:
        left_s = limits.down_cooldown_s - (now_s - max(changes))
        reasons.append(("cooldown_down", f"next shrinking in {left_s:.1f} s"))
        return live
    # The largest want of the window, not its last sample (B33).
    target = min(live, max(n for at, n in memory.wants if now_s - at <= limits.window_s + 1e-9))
    if target < live - limits.step_down:
        target = live - limits.step_down
        reasons.append(("max_step", f"a step gives up {limits.step_down} at most"))
    return target


def _bounded(
    target: int,
    counts: Counts,
    memory: PoolMemory,
    limits: Limits,
    trust: Trust,
    now_s: float,
    reasons: list[tuple[str, str]],
    shut: tuple[float, str],
    *,
    more: bool,
) -> Verdict:
    """Floor and ceiling last, so that no earlier return skips them (B12)."""
    live = counts.live
    if target < limits.low:
        target = limits.low
        reasons.append(_floor(live, limits))
    if target > limits.high:
        target = limits.high
        reasons.append(("ceiling", f"at most {limits.high} by the policy"))
    grow, shrink = max(0, target - live), max(0, live - target)
    if (grow or more) and now_s < memory.retry_s:
        reasons.append(
            (
                "backoff",
                f"{memory.failures} starts failed; next order in {memory.retry_s - now_s:.1f} s",
            )
        )
        grow = 0
    if (grow or more) and now_s < shut[0]:
        reasons.append(("backoff", f"{shut[1]}; next order in {shut[0] - now_s:.1f} s"))
        grow = 0
    if grow and not trust.grow:
        reasons.append(("hold", trust.why))
        grow = 0
    if shrink and not trust.shrink:
        shrink = 0
    return Verdict(target, grow, min(shrink, limits.step_down), tuple(reasons))


def took(memory: PoolMemory, verdict: Verdict, *, turn_s: float, now_s: float) -> PoolMemory:
    """Remember what was done. There and back again, both within `turn_s`, is a reversal.

    Orders, drains and cancelled starts are changes of direction alike; a worker that takes the
    place of a lost or an old one is none.
    """
    desired = memory.desired
    acted = 1 if verdict.grow else -1 if verdict.shrink else 0
    if acted == 0:
        return memory if desired == verdict.target else replace(memory, desired=verdict.target)
    memory = replace(
        memory,
        desired=verdict.target,
        up_s=now_s if acted > 0 else memory.up_s,
        down_s=now_s if acted < 0 else memory.down_s,
        surplus_since_s=None if acted > 0 else memory.surplus_since_s,
        deficit_since_s=None if acted < 0 else memory.deficit_since_s,
    )
    if desired is not None and (verdict.target - desired) * acted <= 0:
        return memory
    leg_s, reversal = memory.leg_s, False
    if memory.direction == -acted and memory.moved_s is not None:
        leg_s = now_s - memory.moved_s
        reversal = leg_s < turn_s and memory.leg_s is not None and memory.leg_s < turn_s
    return replace(
        memory,
        direction=acted,
        moved_s=now_s,
        leg_s=leg_s,
        turns_s=(*memory.turns_s, now_s)[-TURNS_MAX:] if reversal else memory.turns_s,
        reversals=memory.reversals + (1 if reversal else 0),
    )


def hold_down_s(memory: PoolMemory, limits: Limits, now_s: float) -> float:
    """How long surplus must last before anything is given up.

    After a reversal it is a whole `turn_s`, and twice that for each further one of the last
    TURNS_REMEMBERED x `turn_s`: a load that goes up and down faster than capacity pays for itself
    is served from above.
    """
    hold_s = limits.hold_s or 0.0
    recent = [t for t in memory.turns_s if now_s - t < TURNS_REMEMBERED * limits.turn_s]
    if not recent:
        return hold_s
    return max(hold_s, limits.turn_s * 2.0 ** min(len(recent) - 1, DOUBLINGS_MAX))


def _turns_early(memory: PoolMemory, direction: int, limits: Limits, now_s: float) -> bool:
    """Whether going that way now follows too soon on a change the other way."""
    if memory.direction != -direction or memory.moved_s is None:
        return False
    return now_s - memory.moved_s < limits.turn_s


def _lasted_s(since_s: float | None, now_s: float) -> float:
    return 0.0 if since_s is None else now_s - since_s


HELD = {
    "hold_idle": "surplus",
    "hold_headroom": "only the headroom is used up",
    "hold_turn": "after workers were given up, more are wanted, and those that are ready hold the target",
}


def _held(code: str, since_s: float | None, hold_s: float, now_s: float) -> tuple[str, str]:
    return code, f"{HELD[code]} for {_lasted_s(since_s, now_s):.1f} of {hold_s:.1f} s"


def moved(memory: PoolMemory, by_s: float) -> PoolMemory:
    """The same memory on a clock that is ahead by that."""

    def at(time_s: float | None) -> float | None:
        return None if time_s is None else time_s + by_s

    return replace(
        memory,
        up_s=at(memory.up_s),
        down_s=at(memory.down_s),
        surplus_since_s=at(memory.surplus_since_s),
        deficit_since_s=at(memory.deficit_since_s),
        wants=tuple((at_s + by_s, count) for at_s, count in memory.wants),
        retry_s=memory.retry_s + by_s if memory.failures else 0.0,
        moved_s=at(memory.moved_s),
        turns_s=tuple(turn_s + by_s for turn_s in memory.turns_s),
    )


def failed(memory: PoolMemory, count: int, *, limits: Limits, now_s: float) -> PoolMemory:
    """Starts that failed, were refused or never came: the next order waits, longer each time."""
    if count <= 0:
        return memory
    failures = memory.failures + 1
    pause_s = limits.backoff_s * 2.0 ** min(failures - 1, BACKOFF_DOUBLINGS_MAX)
    return replace(memory, failures=failures, retry_s=now_s + pause_s)


def succeeded(memory: PoolMemory) -> PoolMemory:
    """A start became ready: orders are taken at once again."""
    return replace(memory, failures=0, retry_s=0.0) if memory.failures else memory


def budgeted(
    verdicts: tuple[Verdict, Verdict],
    counts: tuple[Counts, Counts],
    limits: tuple[Limits, Limits],
    budget_gpus: int | None,
    before: tuple[int | None, int | None] = (None, None),
) -> tuple[Verdict, Verdict]:
    """Cut targets to the budget, and growth until what is held and ordered fits it.

    A draining worker's GPUs are not free yet, but a target may count on them.

    Args:
        before: the targets until now; what was promised is kept before anything is added to it.
    """
    if budget_gpus is None:
        return verdicts
    if any(c.held and not li.gpus for c, li in zip(counts, limits, strict=True)):
        return _shapeless(verdicts[0]), _shapeless(verdicts[1])
    verdicts = (
        verdicts[0] if limits[0].gpus else _shapeless(verdicts[0]),
        verdicts[1] if limits[1].gpus else _shapeless(verdicts[1]),
    )
    kept = within(verdicts, counts, limits, budget_gpus, before)
    held = sum(c.held * li.gpus for c, li in zip(counts, limits, strict=True))
    live = (counts[0].live, counts[1].live)
    most = [live[i] + min(verdicts[i].grow, max(0, kept[i].target - live[i])) for i in (0, 1)]
    promised = [live[i] if was is None else was for i, was in enumerate(before)]
    reached = _shared(live, most, limits, promised, budget_gpus - held)
    out = list(kept)
    for i in (0, 1):
        granted = reached[i] - live[i]
        if granted < out[i].grow:
            text = f"{budget_gpus} GPUs allow {granted} of {out[i].grow} new workers now"
            out[i] = replace(out[i], grow=granted, reasons=(*out[i].reasons, ("budget", text)))
        elif out[i].target < verdicts[i].target:
            text = f"{budget_gpus} GPUs allow {out[i].target} of {verdicts[i].target} workers"
            out[i] = replace(out[i], reasons=(*out[i].reasons, ("budget", text)))
    return out[0], out[1]


def within(
    verdicts: tuple[Verdict, Verdict],
    counts: tuple[Counts, Counts],
    limits: tuple[Limits, Limits],
    budget_gpus: int | None,
    before: tuple[int | None, int | None] = (None, None),
) -> tuple[Verdict, Verdict]:
    """The verdicts with targets that are within the budget together; growth stays as it is.

    A pool keeps what it has until it may shrink, and its minimum; the other one gets what is left.
    """
    if budget_gpus is None or not all(li.gpus for li in limits):
        return verdicts
    wanted = [v.target for v in verdicts]
    least = [
        min(v.target, max(c.live, li.low))
        for v, c, li in zip(verdicts, counts, limits, strict=True)
    ]
    promised = [c.live if was is None else was for c, was in zip(counts, before, strict=True)]
    used = sum((n + c.standby) * li.gpus for n, c, li in zip(least, counts, limits, strict=True))
    p, d = _shared(least, wanted, limits, promised, budget_gpus - used)
    return replace(verdicts[0], target=p), replace(verdicts[1], target=d)


def _shared(
    least: Sequence[int],
    most: Sequence[int],
    limits: tuple[Limits, Limits],
    promised: Sequence[int],
    room: int,
) -> list[int]:
    """From `least` towards `most` as far as the room goes.

    One by one in turns, so that neither pool starves the other; below its minimum first, then what
    was promised, then the emptier pool.
    """
    found = list(least)
    while True:
        open_ = [i for i in (0, 1) if found[i] < most[i] and limits[i].gpus <= room]
        if not open_:
            return found
        i = min(
            open_,
            key=lambda i: (found[i] >= limits[i].low, found[i] >= promised[i], found[i], i),
        )
        found[i] += 1
        room -= limits[i].gpus


def _floor(live: int, limits: Limits) -> tuple[str, str]:
    return "floor", f"at least {limits.low} by the policy; {live} ready or on their way"


def _shapeless(verdict: Verdict) -> Verdict:
    """What a worker costs is not known: more of them could exceed the budget, fewer cannot (B45)."""
    if not verdict.grow:
        return verdict
    text = f"GPUs of a worker are not known: none of {verdict.grow} is ordered under a budget"
    return replace(verdict, grow=0, reasons=(*verdict.reasons, ("shape_unknown", text)))


def fallback(*, live: int, load: float | None, limits: Limits) -> int:
    """The conservative controller: follow the measured load upwards, never shrink."""
    if load is None or not math.isfinite(load) or load <= 1.0:
        return max(limits.low, min(limits.high, live))
    return max(limits.low, min(limits.high, math.ceil(live * min(load, 2.0))))


def _looked(
    memory: PoolMemory,
    wanted: int | None,
    keep: int | None,
    live: int,
    limits: Limits,
    now_s: float,
) -> PoolMemory:
    """The want of this tick, and since when the pool has been too large or too small.

    What is not known breaks nothing.
    """
    wants = _wants(memory.wants, live if keep is None else keep, limits, now_s)
    if wanted is None or keep is None:
        return replace(memory, wants=wants)
    surplus, deficit = max(keep, limits.low) < live, wanted > live
    return replace(
        memory,
        wants=wants,
        surplus_since_s=since(memory.surplus_since_s, surplus, now_s),
        deficit_since_s=since(memory.deficit_since_s, deficit, now_s),
    )


def _wants(
    before: tuple[tuple[float, int], ...], keep: int, limits: Limits, now_s: float
) -> tuple[tuple[float, int], ...]:
    """The wants of the window with the newest; a run of equal ones is kept as its two ends."""
    span_s = max(limits.window_s, 1.0) + 1e-9
    kept = [want for want in before if now_s - want[0] <= span_s]
    if len(kept) >= 2 and kept[-1][1] == keep and kept[-2][1] == keep:
        kept.pop()
    kept.append((now_s, keep))
    return tuple(kept[-WANTS_MAX:])


def since(since_s: float | None, lasts: bool, now_s: float) -> float | None:
    """Since when something lasts, None while it does not."""
    if not lasts:
        return None
    return now_s if since_s is None else since_s
