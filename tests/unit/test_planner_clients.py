"""Top clients apart: signals by client, parts that add up, and a bound that is used while better."""

import math
import random
from dataclasses import replace

import pytest

from readyplane.core.breakdown import ClientSignals
from readyplane.ports import RouterSignals
from readyplane_planner import forecast
from readyplane_planner.decide import clients as by_client
from readyplane_planner.decide.clients import Asked
from readyplane_planner.forecast import Apart, Forecast, Knobs, Series, apart, parts
from readyplane_planner.forecast.scaling import added
from readyplane_planner.journal import decode_inputs
from readyplane_planner.signals import ClientCount, ClientWork, Kind, RouterSample, Signal
from readyplane_planner.signals.clients import CLIENTS_MAX, rates, scaled
from readyplane_planner.signals.observe import observe
from readyplane_planner.sources import router_sample
from tests.unit.planner_world import MODEL, HandClock, Run, World, planner
from tests.unit.signal_bench import PRIORS, T_READY, Bench

KNOBS = Knobs(warmup_s=60.0)
TICK_S = 2.0


# --------------------------------------------------------------------------- signals


def sample(at_s: float, *clients: ClientCount, life: str = "r", **more: object) -> RouterSample:
    return RouterSample(at_s, life, at_s, clients=clients, **more)  # type: ignore[arg-type]


def fresh(value: float | None, unit: str) -> Signal:
    return Signal(Kind.MISSING if value is None else Kind.FRESH, value, unit)


A10 = ClientCount("a", 1, 10, 1000)


@pytest.mark.parametrize(
    ("before", "now", "arrivals", "work", "kind"),
    [
        (sample(0, A10), sample(2, ClientCount("a", 1, 14, 1600)), 2.0, 300.0, Kind.FRESH),
        (sample(0, A10), sample(2, A10), 0.0, 0.0, Kind.FRESH),
        (sample(0, A10), sample(2, ClientCount("a", 2, 14, 1600)), None, None, Kind.WARMING),
        (sample(0), sample(2, A10), None, None, Kind.WARMING),
        (None, sample(2, A10), None, None, Kind.WARMING),
        (sample(0, A10, life="old"), sample(2, A10), None, None, Kind.WARMING),
        (sample(0, A10), sample(2, ClientCount("a", 1, 4, 600)), None, None, Kind.MISSING),
        (sample(0, A10), sample(2, ClientCount("a", 1, math.nan, -1)), None, None, Kind.MISSING),
    ],
    ids=["grown", "quiet", "new life", "first seen", "first look", "router anew", "dip", "broken"],
)
def test_a_client_is_differenced_within_its_life(
    before: RouterSample | None,
    now: RouterSample,
    arrivals: float | None,
    work: float | None,
    kind: Kind,
) -> None:
    (found,) = rates(before, now, 2.0, fresh, [])
    assert (found.arrivals.value, found.prefill_work.value) == (arrivals, work)
    assert found.arrivals.kind is kind and found.arrivals.unit == "requests/s"
    assert found.prefill_work.unit == "tokens/s"


def test_what_a_sample_may_list_is_bounded_and_said() -> None:
    many = [ClientCount(f"c{i}", i, 1, 1) for i in range(CLIENTS_MAX + 5)]
    bad: list[str] = []
    assert len(rates(None, sample(1, *many), 1.0, fresh, bad)) == CLIENTS_MAX
    assert bad == [f"clients: {CLIENTS_MAX + 5} told of, {CLIENTS_MAX} at most"]
    bad = []
    odd = (ClientCount("", 1, 1, 1), ClientCount("n" * 999, 2, 1, 1), A10, A10)
    assert [c.name for c in rates(None, sample(1, *odd), 1.0, fresh, bad)] == ["a"]
    assert len(bad) == 3 and all(len(b) < 80 for b in bad)


@pytest.mark.parametrize(
    ("age_s", "uptime_s", "kind"),
    [(0.5, 100.0, Kind.FRESH), (9.0, 100.0, Kind.STALE), (0.5, 5.0, Kind.WARMING)],
)
def test_clients_are_worth_what_the_sample_is_worth(
    age_s: float, uptime_s: float, kind: Kind
) -> None:
    before = replace(sample(10, A10), uptime_s=uptime_s - 2)
    now = replace(sample(12, ClientCount("a", 1, 14, 1600)), uptime_s=uptime_s)
    seen = observe(
        model="m", previous=before, current=now, allocations=(),
        t_ready={"prefill": T_READY, "decode": T_READY}, priors=PRIORS, now_s=12 + age_s,
    )  # fmt: skip
    (client,) = seen.clients
    assert client.arrivals.kind is kind and client.arrivals.age_s == age_s
    assert "a" not in seen.unknown(), "a pool shrinks without knowing any client"
    assert scaled(seen, arrivals=2.0).clients[0].arrivals.value == (
        4.0 if kind is Kind.FRESH else None
    )


def test_the_answer_of_a_router_carries_them() -> None:
    world = World(HandClock())
    world.overrides["clients"] = (ClientSignals("a", 3, 7, 900),)
    taken = router_sample(world._signals_now(), MODEL, taken_s=5.0)
    assert taken.clients == (ClientCount("a", 3, 7, 900),)


# --------------------------------------------------------------------------- parts and sum


class Played:
    """A whole and its parts, tick by tick, as the planner keeps them."""

    def __init__(self, horizon_s: float = 30.0) -> None:
        self.whole, self.apart, self.now_s, self.horizon_s = Series(), Apart(), 100.0, horizon_s
        self.made: list[tuple[Forecast, Forecast]] = []
        self.used = 0

    def tick(self, told: dict[str, float], rest: float = 0.0) -> None:
        self.now_s += TICK_S
        rate = sum(told.values()) + rest
        take = {"dt_s": TICK_S, "now_s": self.now_s, "knobs": KNOBS}
        self.whole = forecast.update(self.whole, rate, **take)  # type: ignore[arg-type]
        made = forecast.predict(self.whole, horizon_s=self.horizon_s, knobs=KNOBS)
        self.apart = forecast.seen(self.apart, told, self.whole, rate, **take)  # type: ignore[arg-type]
        ours = forecast.chosen(self.apart, self.whole, made, knobs=KNOBS)
        self.made.append((made, ours))
        self.used += self.apart.used
        self.apart = forecast.remembered(
            self.apart, self.whole, horizon_s=self.horizon_s, now_s=self.now_s, knobs=KNOBS
        )
        self.whole = forecast.remember(self.whole, made, now_s=self.now_s, knobs=KNOBS)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are apart after half a minute: what is tested is not how long that takes."""
    monkeypatch.setattr(parts, "AT_HOME_S", 30.0)
    monkeypatch.setattr(apart, "JUDGED_MIN", 3)


@pytest.mark.usefixtures("soon")
def test_parts_and_rest_add_up_to_the_whole() -> None:
    played, draws = Played(), random.Random(2)
    for _ in range(120):
        told = {f"c{i}": draws.uniform(0, 1000) * (i + 1) for i in range(9)}
        played.tick(told, rest=draws.uniform(0, 500))
        now = sum(forecast.trailing(s, 10.0) for s in played.apart.parts.apart)
        assert now == pytest.approx(forecast.trailing(played.whole, 10.0), rel=1e-6)
    assert sum(p.alone for p in played.apart.parts.each) == parts.PARTS_MAX
    assert all(len(s.tracks) == 1 for s in played.apart.parts.apart)


@pytest.mark.usefixtures("soon")
def test_who_is_quiet_or_not_told_of_goes_back_and_at_last_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "QUIET_S", 60.0)
    played = Played()
    for _ in range(40):
        played.tick({"a": 500.0, "b": 300.0}, rest=200.0)
    assert [p.name for p in played.apart.parts.each] == ["a", "b"]
    for _ in range(40):
        played.tick({"a": 500.0, "b": 0.0}, rest=500.0)
    assert [p.name for p in played.apart.parts.each] == ["a"]
    level = forecast.predict(played.apart.parts.rest, horizon_s=30.0, knobs=KNOBS).level
    assert level == pytest.approx(500.0, rel=0.05)
    for _ in range(40):
        played.tick({}, rest=1000.0)
    assert played.apart == Apart()


@pytest.mark.usefixtures("soon")
def test_names_that_come_and_go_do_not_fill_the_memory() -> None:
    played, draws = Played(), random.Random(3)
    for i in range(150):
        played.tick({f"c{draws.randrange(i + 1)}": 100.0 for _ in range(12)})
        assert len(played.apart.parts.each) <= parts.PARTS_MAX
        assert len(played.apart.awaited) <= apart.AWAITED_MAX


@pytest.mark.usefixtures("soon")
def test_a_gap_voids_what_waits_and_no_label_costs_nothing() -> None:
    played = Played()
    for _ in range(30):
        played.tick({"a": 500.0})
    assert len(played.apart.awaited) > 1
    after = forecast.interrupted(played.apart)
    assert after.awaited == () and after.parts.rest.recent == ()
    nobody = Apart()
    assert forecast.interrupted(nobody) is nobody
    seen = forecast.seen(nobody, {}, played.whole, 1.0, dt_s=1.0, now_s=1.0, knobs=KNOBS)
    assert seen is nobody
    made = Forecast(1.0, 2.0, 0.0, 1.0, 30.0)
    assert forecast.chosen(nobody, played.whole, made, knobs=KNOBS) is made


def test_taking_out_and_putting_back_is_where_it_began() -> None:
    one, other = Series(), Series()
    for i in range(60):
        take = {"dt_s": 2.0, "now_s": 2.0 * i, "knobs": KNOBS}
        one = forecast.update(one, 900.0 + i, **take)  # type: ignore[arg-type]
        other = forecast.update(other, 100.0, **take)  # type: ignore[arg-type]
    back = added(added(one, other, -1.0), other, 1.0)
    assert back.ewma == pytest.approx(one.ewma) and back.holt_level == pytest.approx(one.holt_level)
    assert forecast.trailing(back, 10.0) == pytest.approx(forecast.trailing(one, 10.0))


def loss(played: Played, rates_: list[float], ours: bool) -> float:
    """Mean pinball of the bounds against the largest window within the horizon, of the last half."""
    found, h, w = [], round(played.horizon_s / TICK_S), round(KNOBS.window_s / TICK_S)
    for i in range(len(rates_) // 2, len(rates_) - h):
        peak = max(sum(rates_[j - w + 1 : j + 1]) / w for j in range(i + w, i + h + 1))
        over = peak - played.made[i][ours].upper
        found.append(0.9 * over if over > 0 else -0.1 * over)
    return sum(found) / len(found)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("shares", "used"),
    [(lambda i: (8000.0 * (i % 60 < 30), 8000.0 * (i % 60 >= 30)), False), (None, True)],
    ids=["opposites: the whole is level", "clients that keep their own hours"],
)
def test_the_sum_is_gone_by_only_where_it_forecasts_better(shares: object, used: bool) -> None:
    played, draws, all_rates = Played(), random.Random(5), []
    on, left = [False, False, False], [0, 0, 0]
    for i in range(900):
        if callable(shares):
            told = dict(zip("ab", shares(i), strict=True))
        else:
            for k in range(3):
                if left[k] == 0:
                    on[k], left[k] = not on[k], draws.randrange(100, 200)
                left[k] -= 1
            told = {f"c{k}": 5000.0 * on[k] * draws.uniform(0.9, 1.1) for k in range(3)}
        played.tick(told, rest=draws.uniform(900, 1100))
        all_rates.append(sum(told.values()) + 1000.0)
    assert played.used > 300 if used else played.used < 50
    better = loss(played, all_rates, ours=True) / loss(played, all_rates, ours=False)
    assert better < 0.95 if used else better == 1.0


# --------------------------------------------------------------------------- decisions


class Labelled(World):
    """Two clients bring seven tenths of everything, the smaller of them by bursts."""

    def _signals_now(self) -> RouterSignals:
        found = super()._signals_now()
        model = found.models[MODEL]
        clients = tuple(
            ClientSignals(
                name,
                number,
                int(share * model.arrivals_total),
                int(share * model.arrival_uncached_tokens_total),
            )
            for number, (name, share) in enumerate((("big", 0.5), ("small", 0.2)))
        )
        return replace(found, models={MODEL: replace(model, clients=clients)})


def load(t: float) -> float:
    return 6.0 + 4.0 * math.sin(t / 15.0)


async def decided(world: World, seconds: float = 90.0) -> Run:
    run = await planner(world)
    await run.step(seconds)
    return run


def passed(
    _observation: object,
    _plan: object,
    _memory: object,
    works: tuple[tuple[Series, Signal, Forecast], tuple[Series, Signal, Forecast]],
    _osl: float,
    *,
    now_s: float,
) -> tuple[Asked, Asked]:
    """The forecasts as they would be without any of this."""
    p, d = works
    return Asked(p[2], p[2], Apart()), Asked(d[2], d[2], Apart())


async def test_without_labels_every_decision_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = await decided(World(HandClock(), rps=load))
    monkeypatch.setattr(by_client, "asked", passed)
    before = await decided(World(HandClock(), rps=load))
    assert now.decisions == before.decisions and len(now.decisions) == 90
    assert len({d.prefill.target for d in now.decisions}) > 1
    assert now.service._memory.apart_p == Apart() == now.service._memory.apart_d
    labelled = await decided(Labelled(HandClock(), rps=load))
    assert labelled.decisions == before.decisions, "labels that were not judged yet change nothing"


@pytest.mark.usefixtures("soon")
async def test_decisions_with_clients_apart_replay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Apart, "used", property(lambda a: a.parts.any_alone and a.judged > 3))
    run = await decided(Labelled(HandClock(), rps=load))
    kept = await run.journal.newest(MODEL, limit=100)
    apart_seen = 0
    for listed in kept:
        found = await run.service.replay(listed.decision_id)
        assert found["same"] is True, found["differences"]
        record = (await run.journal.get(listed.decision_id))[0]
        apart_seen += decode_inputs(record.inputs).memory.apart_p.used
    assert apart_seen > 0, "a decision that went by the sum was among them"


def test_another_quantile_keeps_its_place() -> None:
    was = Forecast(100.0, 200.0, 0.0, 90.0, 30.0)
    asked = Asked(was, replace(was, upper=150.0), Apart())
    assert [asked.moved(r) for r in (100.0, 150.0, 200.0, 300.0)] == [100.0, 125.0, 150.0, 200.0]
    assert Asked(was, was, Apart()).moved(123.4) == 123.4


def test_a_pool_shrinks_though_no_client_is_known() -> None:
    bench = Bench()
    bench.tick(5.0)
    assert bench.seen is not None
    unknown = Signal(Kind.MISSING, None, "requests/s")
    seen = replace(bench.seen, clients=(ClientWork("a", unknown, unknown),))
    assert seen.unknown() == bench.seen.unknown()
