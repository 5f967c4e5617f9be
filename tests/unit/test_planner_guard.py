"""The guard: whatever is proposed, targets stay in bounds, steps stay small, orders never stack."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_planner.guard import (
    Counts,
    Limits,
    PoolMemory,
    Trust,
    Verdict,
    budgeted,
    failed,
    fallback,
    hold_down_s,
    judge,
    succeeded,
    took,
)

LIMITS = Limits(
    low=1,
    high=10,
    step_up=2,
    step_down=1,
    up_cooldown_s=5.0,
    down_cooldown_s=10.0,
    window_s=20.0,
    hold_s=30.0,
    pending_max=3,
)
LONG_IDLE = PoolMemory(surplus_since_s=0.0)


def verdict(
    wanted: int | None,
    keep: int | None = None,
    *,
    counts: Counts,
    memory: PoolMemory | None = None,
    limits: Limits = LIMITS,
    trust: Trust | None = None,
    paused: bool = False,
    now_s: float = 1000.0,
) -> Verdict:
    return judge(
        wanted=wanted,
        keep=wanted if keep is None else keep,
        counts=counts,
        memory=memory or PoolMemory(),
        limits=limits,
        trust=trust or Trust(),
        paused=paused,
        now_s=now_s,
    )[0]


def codes(found: Verdict) -> set[str]:
    return {code for code, _text in found.reasons}


@pytest.mark.parametrize(
    ("wanted", "counts", "memory", "trust", "target", "grow", "shrink", "code"),
    [
        (4, Counts(3, 0), PoolMemory(), Trust(), 4, 1, 0, None),
        (9, Counts(3, 0), PoolMemory(), Trust(), 5, 2, 0, "max_step"),
        (9, Counts(3, 2), PoolMemory(), Trust(), 6, 1, 0, "gap_limit"),
        (4, Counts(3, 0), PoolMemory(up_s=996.0), Trust(), 3, 0, 0, "cooldown_up"),
        (99, Counts(9, 0), PoolMemory(), Trust(), 10, 1, 0, "ceiling"),
        (2, Counts(3, 0), PoolMemory(), Trust(), 3, 0, 0, "hold_idle"),
        (2, Counts(3, 0), LONG_IDLE, Trust(), 2, 0, 1, None),
        (1, Counts(5, 0), LONG_IDLE, Trust(), 4, 0, 1, "max_step"),
        (2, Counts(3, 0), replace(LONG_IDLE, up_s=995.0), Trust(), 3, 0, 0, "cooldown_down"),
        (2, Counts(3, 0, backlog=True), LONG_IDLE, Trust(), 3, 0, 0, "backlog"),
        (2, Counts(3, 0), LONG_IDLE, Trust(shrink=False, why="x"), 3, 0, 0, "partial_data"),
        (5, Counts(3, 0), PoolMemory(), Trust(shrink=False, why="x"), 5, 2, 0, None),
        (None, Counts(3, 0), LONG_IDLE, Trust(shrink=False, why="x"), 3, 0, 0, "hold"),
        (None, Counts(0, 0), PoolMemory(), Trust(shrink=False, why="x"), 1, 1, 0, "floor"),
        (4, Counts(3, 0), PoolMemory(), Trust(grow=False, why="x"), 3, 0, 0, "hold"),
        (3, Counts(2, 0), PoolMemory(retry_s=1001.0, failures=2), Trust(), 3, 0, 0, "backoff"),
    ],
)
def test_rules(
    wanted: int | None,
    counts: Counts,
    memory: PoolMemory,
    trust: Trust,
    target: int,
    grow: int,
    shrink: int,
    code: str | None,
) -> None:
    found = verdict(wanted, counts=counts, memory=memory, trust=trust)
    assert (found.target, found.grow, found.shrink) == (target, grow, shrink)
    assert code is None or code in codes(found)


def test_floor_holds_with_no_data_at_all() -> None:
    """B12: an outage must not leave a pool below its minimum."""
    limits = replace(LIMITS, low=2)
    blind = Trust(shrink=False, why="signals are missing")
    found = verdict(None, counts=Counts(1, 0), limits=limits, trust=blind)
    assert (found.target, found.grow) == (2, 1) and "floor" in codes(found)


def test_band_between_growing_and_shrinking() -> None:
    """B31, R21.1: between what is wanted and what is kept nothing moves."""
    found = verdict(3, 4, counts=Counts(4, 0), memory=LONG_IDLE)
    assert (found.target, found.grow, found.shrink) == (4, 0, 0)


def test_shrinking_follows_the_largest_want_of_its_window() -> None:
    """B33: 10, 10, 15, 10, 10, 5 in the window applies 15, or the current size if lower."""
    memory = PoolMemory(surplus_since_s=0.0)
    limits = replace(LIMITS, high=30, step_down=30)
    now_s = 1000.0
    for keep in (10, 10, 15, 10, 10):
        now_s += 2.0
        _found, memory = judge(
            wanted=keep,
            keep=keep,
            counts=Counts(20, 0),
            memory=memory,
            limits=replace(limits, hold_s=1e9),
            trust=Trust(),
            paused=False,
            now_s=now_s,
        )
    found = verdict(5, counts=Counts(20, 0), memory=memory, limits=limits, now_s=now_s + 2.0)
    assert found.target == 15
    found = verdict(5, counts=Counts(12, 0), memory=memory, limits=limits, now_s=now_s + 2.0)
    assert found.target == 12
    late = verdict(5, counts=Counts(20, 0), memory=memory, limits=limits, now_s=now_s + 60.0)
    assert late.target == 5


def test_paused_does_nothing() -> None:
    """B37: one call stops every writing, in both directions and at the floor."""
    for wanted, counts in ((9, Counts(3, 0)), (1, Counts(8, 0)), (3, Counts(0, 0))):
        found = verdict(wanted, counts=counts, memory=LONG_IDLE, paused=True)
        assert (found.grow, found.shrink) == (0, 0) and codes(found) == {"paused"}


def test_backoff_doubles_is_bounded_and_ends_with_a_success() -> None:
    memory = PoolMemory()
    pauses = []
    for _ in range(12):
        memory = failed(memory, 1, limits=LIMITS, now_s=0.0)
        pauses.append(memory.retry_s)
    assert pauses[:4] == [5.0, 10.0, 20.0, 40.0]
    assert max(pauses) == 5.0 * 64
    assert failed(PoolMemory(), 0, limits=LIMITS, now_s=0.0) == PoolMemory()
    assert succeeded(memory).retry_s == 0.0


def test_budget_counts_whole_workers_and_what_still_drains() -> None:
    """B45: a worker of 2 nodes x 8 GPUs costs 16; draining ones hold theirs."""
    big = replace(LIMITS, gpus=16)
    grow = (Verdict(4, grow=2), Verdict(4, grow=2))
    counts = (Counts(2, 0), Counts(2, 0))
    both = budgeted(grow, counts, (big, big), 96)
    assert [v.grow for v in both] == [1, 1]
    assert all("budget" in codes(v) for v in both)
    draining = (Counts(2, 0, draining=2), Counts(2, 0))
    assert [v.grow for v in budgeted(grow, draining, (big, big), 96)] == [0, 0]
    assert budgeted(grow, counts, (big, big), None) == grow
    small = replace(LIMITS, gpus=1)
    mixed = budgeted(grow, (Counts(2, 0), Counts(2, 0)), (big, small), 40)
    assert [v.grow for v in mixed] == [0, 2]


def test_fallback_never_shrinks() -> None:
    assert fallback(live=4, load=None, limits=LIMITS) == 4
    assert fallback(live=4, load=0.1, limits=LIMITS) == 4
    assert fallback(live=4, load=1.3, limits=LIMITS) == 6
    assert fallback(live=4, load=50.0, limits=LIMITS) == 8
    assert fallback(live=9, load=2.0, limits=LIMITS) == 10
    assert fallback(live=4, load=float("nan"), limits=LIMITS) == 4
    assert fallback(live=0, load=None, limits=LIMITS) == 1


def moves(*steps: tuple[float, int], turn_s: float = 30.0) -> PoolMemory:
    """The memory after targets that moved by so much at those times, from 5 on."""
    memory, target = PoolMemory(desired=5), 5
    for at_s, by in steps:
        target += by
        found = Verdict(target, grow=max(0, by), shrink=max(0, -by))
        memory = took(memory, found, turn_s=turn_s, now_s=at_s)
    return memory


@pytest.mark.parametrize(
    ("steps", "reversals"),
    [
        (((0.0, 1), (20.0, -1)), 0),  # up and down once: a load that came and went
        (((0.0, 1), (20.0, -1), (40.0, 1)), 1),  # and up again: given up for nothing
        (((0.0, 1), (20.0, -1), (40.0, 1), (60.0, -1)), 2),
        (((0.0, 1), (40.0, -1), (60.0, 1)), 0),  # the first stay was long enough
        (((0.0, 1), (20.0, -1), (60.0, 1)), 0),
        (((0.0, 1), (10.0, 1), (20.0, 1)), 0),
        (((0.0, 1), (20.0, -1), (25.0, -1), (40.0, 1)), 1),
    ],
)
def test_a_reversal_is_there_and_back_within_its_time(
    steps: tuple[tuple[float, int], ...], reversals: int
) -> None:
    assert moves(*steps).reversals == reversals


def test_replacing_what_was_lost_is_no_direction() -> None:
    """A crash, a refused order or a roll-out moves no target."""
    memory = took(moves((0.0, -1)), Verdict(4, grow=1), turn_s=30.0, now_s=5.0)
    assert (memory.direction, memory.reversals, memory.up_s) == (-1, 0, 5.0)


def test_after_shrinking_more_is_wanted_only_for_a_while_or_for_a_breach() -> None:
    """Cancelling, draining and ordering are changes of direction: back again needs evidence."""
    limits = replace(LIMITS, turn_s=60.0, up_cooldown_s=0.0)
    memory = moves((990.0, -1))
    kept = verdict(5, counts=Counts(4, 0), memory=memory, limits=limits)
    assert kept.grow == 0 and "hold_turn" in codes(kept)
    breach = verdict(5, counts=Counts(4, 0, breach=True), memory=memory, limits=limits)
    assert breach.grow == 1
    lasting = replace(memory, deficit_since_s=960.0)
    assert verdict(5, counts=Counts(4, 0), memory=lasting, limits=limits).grow == 1
    long_ago = verdict(5, counts=Counts(4, 0), memory=moves((900.0, -1)), limits=limits)
    assert long_ago.grow == 1
    crashed = verdict(5, counts=Counts(3, 0), memory=memory, limits=limits)
    assert (crashed.target, crashed.grow) == (4, 1), "what was lost is replaced at once"


def test_each_reversal_makes_the_next_shrinking_wait_longer() -> None:
    limits = replace(LIMITS, hold_s=10.0, turn_s=60.0)
    there_and_back = ((0.0, 1), (10.0, -1), (20.0, 1))
    once = moves(*there_and_back, turn_s=60.0)
    twice = moves(*there_and_back, (30.0, -1), turn_s=60.0)
    assert hold_down_s(moves((0.0, 1), turn_s=60.0), limits, 30.0) == 10.0
    assert hold_down_s(once, limits, 30.0) == 60.0
    assert hold_down_s(twice, limits, 30.0) == 120.0
    assert hold_down_s(twice, limits, 30.0 + 8 * 60.0) == 10.0, "forgotten"


def test_headroom_is_used_before_it_is_ordered_anew() -> None:
    limits = replace(LIMITS, up_hold_s=5.0)

    def grows(urgent: int, since_s: float | None) -> int:
        found, _memory = judge(
            wanted=4,
            keep=4,
            urgent=urgent,
            counts=Counts(3, 0),
            memory=PoolMemory(deficit_since_s=since_s),
            limits=limits,
            trust=Trust(),
            paused=False,
            now_s=1000.0,
        )
        return found.grow

    assert (grows(4, None), grows(3, None), grows(3, 997.0), grows(3, 995.0)) == (1, 0, 0, 1)


limits_of = st.builds(
    Limits,
    low=st.integers(0, 6),
    high=st.integers(6, 40),
    step_up=st.integers(1, 8),
    step_down=st.integers(1, 8),
    up_cooldown_s=st.floats(0, 20),
    down_cooldown_s=st.floats(0, 20),
    window_s=st.floats(1, 40),
    hold_s=st.floats(0, 40),
    pending_max=st.integers(1, 10),
)
wants = st.one_of(st.none(), st.integers(-5, 10_000))


@given(
    limits=limits_of,
    wanted=wants,
    band=st.integers(0, 10),
    ready=st.integers(0, 60),
    pending=st.integers(0, 20),
    grow=st.booleans(),
    shrink=st.booleans(),
    paused=st.booleans(),
    idle_s=st.one_of(st.none(), st.floats(0, 999)),
)
def test_any_proposal_stays_inside(
    limits: Limits,
    wanted: int | None,
    band: int,
    ready: int,
    pending: int,
    grow: bool,
    shrink: bool,
    paused: bool,
    idle_s: float | None,
) -> None:
    """R23.2: whatever an optimiser proposes, however wild (B28)."""
    counts = Counts(ready, pending)
    found, _memory = judge(
        wanted=wanted,
        keep=None if wanted is None else wanted + band,
        counts=counts,
        memory=PoolMemory(surplus_since_s=idle_s),
        limits=limits,
        trust=Trust(grow, shrink, "x"),
        paused=paused,
        now_s=1000.0,
    )
    if not paused:
        assert limits.low <= found.target <= limits.high
    assert found.grow <= max(limits.step_up, limits.low - counts.live)
    assert found.shrink <= limits.step_down
    assert not (found.grow and found.shrink)
    assert counts.live + found.grow <= max(limits.high, counts.live)
    if found.grow and counts.live >= limits.low:
        assert pending + found.grow <= max(limits.pending_max, pending)
    if found.shrink:
        assert shrink and counts.live - found.shrink >= limits.low
    if paused or not grow:
        assert found.grow == 0


@given(
    limits=limits_of,
    wanted=st.lists(st.integers(0, 60), min_size=5, max_size=60),
    t_ready=st.integers(1, 30),
)
def test_orders_never_stack(limits: Limits, wanted: list[int], t_ready: int) -> None:
    """B20: over any course of wants, workers on their way count, so that live never exceeds max
    and never what was last wanted plus one step.
    """
    memory = PoolMemory()
    ready = limits.low
    coming: list[int] = []
    for now, want in enumerate(wanted):
        ready += sum(1 for at in coming if at <= now)
        coming = [at for at in coming if at > now]
        found, memory = judge(
            wanted=want,
            keep=want,
            counts=Counts(ready, len(coming)),
            memory=memory,
            limits=limits,
            trust=Trust(),
            paused=False,
            now_s=float(now),
        )
        before = ready + len(coming)
        assert before + found.grow <= max(limits.low, min(limits.high, max(want, before)))
        coming += [now + t_ready] * found.grow
        gone = min(found.shrink, ready)
        ready -= gone
        memory = took(memory, found, turn_s=10.0, now_s=float(now))
        assert ready + len(coming) <= max(limits.high, limits.low)
