"""Several classes, start modes and what they are worth: from needs to starts and give-ups by class.

A pool of several classes is sized in workers of its reference class. Owns what a worker of another
class or mode is worth in those at the targets and lengths of now, the costs that the choice among
them rests on, and the step from a need in reference workers to whole workers of the classes that the
pool has and may start. Guard goes on counting workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from readyplane.core.profile import ClassProfile
from readyplane.core.startup import StartQuantiles
from readyplane_planner import capacity
from readyplane_planner.decide import demand, denials
from readyplane_planner.decide.pools import Pool
from readyplane_planner.decide.values import (
    ClassPlan,
    Memory,
    Plan,
    PoolPlan,
    Reason,
    slowness,
    start_key,
)
from readyplane_planner.guard import Counts
from readyplane_planner.optimise import Bounds, Need, Proposal
from readyplane_planner.optimise.candidates import MISS_PRICE
from readyplane_planner.optimise.mix import Held, Mix, Offer, gives, start_cost, starts
from readyplane_planner.optimise.modes import MODES, ModeChoice, ModeOffer, choose_mode
from readyplane_planner.optimise.size import ROUND
from readyplane_planner.signals import Observation

Both = tuple[Pool, Pool]
AUTO = "auto"
LIFE_S = 1800.0
"""Capacity is expected to serve that long until lives were seen; counts as LIFE_COUNT of them."""
LIFE_COUNT = 2
KEPT_MIN = 0.1
"""Giving a worker up saves at least that share of its life, however long it would take to return."""

DEAR = 1.5
"""Whose work costs so much more than another's is not taken while that one can be had. It could be
cheaper for a small remainder, but a pool that fills every remainder so ends as a crowd of them."""


@dataclass(frozen=True, slots=True)
class Pick:
    """What one start is to be, and why; where it would serve soonest, and why there."""

    worker_class: str
    mode: str
    why: str = ""
    nodes: tuple[str, ...] = ()
    way: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a pool starts next and gives up first.

    Attributes:
        starts: the next ones in their order. more: whatever is started beyond them.
        gives: "class/mode" of those that go, in their order; empty for any.
        why: of a class, in words; only said of what is started.
    """

    starts: tuple[Pick, ...]
    more: Pick
    gives: tuple[str, ...] = ()
    why: Callable[[str], str] = lambda _name: ""

    def picks(self, count: int) -> tuple[Pick, ...]:
        """So many starts, each with its reason."""
        found = (*self.starts[:count], *(self.more for _ in range(count - len(self.starts))))
        return tuple(replace(pick, why=self.why(pick.worker_class)) for pick in found)


def plain(plan: Plan, name: str) -> Choice:
    """The only class in the only mode."""
    mode = MODES[0] if plan.start_mode == AUTO else plan.start_mode
    return Choice((), Pick(plan.pool(name).worker_class, mode))


def mixes(plan: Plan, name: str) -> bool:
    """Whether its workers differ: by class, by mode, or by whether they have their graphs yet."""
    return bool(plan.pool(name).classes) or plan.start_mode == AUTO or plan.graph_stages


def classes_of(pool: PoolPlan) -> tuple[ClassPlan, ...]:
    """The classes of a pool, also of one that names none."""
    if pool.classes:
        return pool.classes
    price = pool.profile.price_per_gpu_hour * pool.profile.gpus
    return (ClassPlan(pool.worker_class, pool.profile, price, 0, pool.limits.high),)


# --------------------------------------------------------------------------- worth


def weigh(pools: Both, observation: Observation, plan: Plan, memory: Memory) -> None:
    """Tell pools of several classes or modes what each of their workers is worth."""
    for pool in pools:
        if mixes(plan, pool.name):
            pool.worth = worth(pool.name, observation, plan, memory)


def worth(name: str, observation: Observation, plan: Plan, memory: Memory) -> Mapping[str, float]:
    """Reference workers by class and mode; 0 where the targets cannot be kept."""
    isl, uncached = demand.mean_lengths(observation, memory.averages)
    osl = demand.mean_output(observation, memory.averages)
    pool = plan.pool(name)

    def rate(profile: ClassProfile, slow: float) -> float:
        if name == "prefill":
            own_s = profile.prefill_s(max(1.0, uncached), max(0.0, isl - uncached)) * slow
            return uncached / own_s if own_s + plan.overhead_s <= plan.ttft_s else 0.0
        model = capacity.decode_model(profile, isl=isl, osl=osl, factor=1.0 / slow)
        return model.rate_at(plan.tpot_s) if model.sequences_at(plan.tpot_s) >= 1.0 else 0.0

    reference = rate(pool.profile, 1.0)
    found: dict[str, float] = {}
    for offered in classes_of(pool):
        for mode in MODES:
            slow = slowness(offered.profile, mode)
            # Where not even the reference keeps the targets, nobody is told apart.
            value = rate(offered.profile, slow) / reference if reference > 0 else 1.0 / slow
            found[f"{offered.worker_class}/{mode}"] = value
    return found


def bounds(plan: Plan, pool: Pool) -> Bounds:
    """Bounds in reference workers, wide enough for any mix; whole workers are bounded by guard."""
    limits = plan.pool(pool.name).limits
    if not pool.worth:
        return Bounds(limits.low, limits.high, limits.gpus, plan.pool(pool.name).spare)
    least, most = min(pool.worth.values()), max(1.0, *pool.worth.values())
    return Bounds(int(limits.low * least), int(limits.high * most) + 1, limits.gpus)


# --------------------------------------------------------------------------- choice


def choose(
    proposal: Proposal | None,
    observation: Observation,
    plan: Plan,
    memory: Memory,
    pools: Both,
    counts: tuple[Counts, Counts],
    *,
    now_s: float,
) -> tuple[Proposal | None, tuple[Choice, Choice], list[Reason]]:
    """The proposal in whole workers of the classes there are, and what those shall be.

    Pools with nothing to choose pass as they are.
    """
    said: list[Reason] = []
    choices: list[Choice] = []
    room = None
    if plan.budget_gpus is not None:
        room = max(0, plan.budget_gpus - sum(gpus_held(p, plan) for p in pools))
    for place, pool in enumerate(pools):
        if not pool.worth:
            choices.append(plain(plan, pool.name))
            continue
        market = _Market(pool, observation, plan, memory, counts[place], proposal, room, now_s)
        proposal = market.translated(proposal, said)
        choices.append(market.choice)
    return proposal, (choices[0], choices[1]), said


def gpus_held(pool: Pool, plan: Plan) -> int:
    """GPUs that a pool occupies, the draining and the overdue too."""
    mine = plan.pool(pool.name)
    gpus = {c.worker_class: c.profile.gpus for c in classes_of(mine)}
    members: Iterable[str] = (
        *(w.worker_class for w in (*pool.ready, *pool.unpairable, *pool.draining, *pool.stalled)),
        *(w.worker_class for w in pool.standby),
        *(c.worker_class for c in (*pool.coming, *pool.overdue, *pool.preparing)),
    )
    return sum(gpus.get(name, mine.limits.gpus) for name in members)


class _Market:
    """One pool: what is on offer at what cost, and what follows from a need."""

    def __init__(
        self,
        pool: Pool,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        counts: Counts,
        proposal: Proposal | None,
        room_gpus: int | None,
        now_s: float,
    ) -> None:
        self._pool, self._plan, self._mine = pool, plan, plan.pool(pool.name)
        self._observation, self._memory = observation, memory
        self._room_gpus, self._now_s = room_gpus, now_s
        self._t_ready = observation.t_ready[pool.name]
        self._need: Need | None = None
        if proposal is not None:
            self._need = proposal.need_p if pool.name == "prefill" else proposal.need_d
        self._live = pool.live_worth
        backlog = self._need is not None and self._need.why == "backlog"
        self.life_s = expected_life_s(
            memory, pool.name, bound_s=plan.catch_up_s + self._t_ready.p50_s if backlog else None
        )
        short = self._need is not None and self._need.bare > pool.ready_worth + ROUND
        self.in_time_s = (
            0.0 if counts.breach or (short and not pool.coming) else self._t_ready.p50_s
        )
        self.have = Counter(m.worker_class for m in pool.members)
        own = [m for m in pool.members if not m.attached]
        self._own = Counter(m.worker_class for m in own)
        self._kinds = Counter(f"{m.worker_class}/{m.mode}" for m in own)
        self.modes = {c.worker_class: self._mode(c) for c in classes_of(self._mine)}
        self.offers = _not_dear([self._offer(c) for c in classes_of(self._mine)])
        self.choice = Choice((), self._more(), why=self._why)

    def translated(self, proposal: Proposal | None, said: list[Reason]) -> Proposal | None:
        """Targets in whole workers; sets what is started and given up for them."""
        if proposal is None:
            return None
        is_p, need, pool = self._pool.name == "prefill", self._need, self._pool
        most, most_keep = (proposal.p, proposal.p_keep) if is_p else (proposal.d, proposal.d_keep)
        spare = self._mine.spare * max([1.0, *(pool.worth_of(w) for w in pool.ready)])
        # What bounds cut is cut; what they raised is raised in workers, by guard.
        wanted = float(most) if need is None else min(need.workers - ROUND, float(most))
        kept = float(most_keep) if need is None else min(need.keep - ROUND, float(most_keep))
        at_once = wanted if need is None else min(need.bare - ROUND, wanted)
        spare = spare if wanted > 0 else 0.0
        wanted, kept = wanted + spare, max(kept, wanted) + spare
        limits, live = self._mine.limits, pool.live
        found = starts(
            wanted - self._live,
            self.offers,
            room=max(0, limits.high - live),
            gpus=self._room_gpus,
        )
        count = live + found.count
        down = self._gives(self._live - wanted, limits.low)
        if not found.count:
            count = live - down.count
        keep = max(count, live - self._gives(self._live - kept, limits.low).count)
        self._explain(found, wanted, said)
        of = {name: self._pick(name) for name, _count in found.counts}
        picks = tuple(of[name] for name in found.classes())
        self.choice = replace(self.choice, starts=picks, gives=down.classes())
        now = min(count, self._covering(at_once, picks))
        if is_p:
            return replace(proposal, p=count, p_keep=keep, p_now=now)
        return replace(proposal, d=count, d_keep=keep, d_now=now)

    def _covering(self, need: float, picks: Sequence[Pick]) -> int:
        """Workers with which the need is met, taking the picks in their order."""
        worth, count = self._live, self._pool.live
        for pick in picks:
            if worth >= need:
                break
            worth += self._pool.worth.get(f"{pick.worker_class}/{pick.mode}", 1.0)
            count += 1
        return count

    def _gives(self, surplus: float, low: int) -> Mix:
        held = []
        offered = {c.worker_class: c for c in classes_of(self._mine)}
        spare = {name: self._own[name] - offered[name].low for name in offered}
        worth = self._pool.worth
        # What is worth less for the same price comes first where a minimum leaves some to keep.
        for kind in sorted(self._kinds, key=lambda kind: (worth.get(kind, 1.0), kind)):
            name, count = kind.rpartition("/")[0], self._kinds[kind]
            if name not in offered:
                # Of a class that the policy no longer names: the first to go.
                held.append(Held(kind, worth.get(kind, 1.0), 1e9, count))
                continue
            # What goes may have to come back: it saves what it would serve, less its next start.
            saved_s = max(self.life_s - self._ready(name).p50_s, KEPT_MIN * self.life_s)
            count = max(0, min(count, spare[name]))
            spare[name] -= count
            saving = offered[name].price / 3600.0 * saved_s
            held.append(Held(kind, worth.get(kind, 1.0), saving, count))
        return gives(max(0.0, surplus), held, most=max(0, self._pool.live - low))

    # ------------------------------------------------------------------ offers

    def _offer(self, offered: ClassPlan) -> Offer:
        name, mode = offered.worker_class, self.modes[offered.worker_class]
        have = self.have[name]
        value = self._pool.worth.get(f"{name}/{mode.mode}", 0.0)
        blocked = denials.denied(self._memory, self._pool.name, name, now_s=self._now_s)
        cost = start_cost(
            price_per_s=offered.price / 3600.0,
            ready_s=mode.ready_s,
            life_s=self.life_s,
            rate=value,
            in_time_s=self.in_time_s,
            missed_per_s=self._missed_per_s,
        )
        room = 0 if blocked is not None else max(0, offered.high - have)
        return Offer(name, value, cost, offered.profile.gpus, room, max(0, offered.low - have))

    @property
    def _missed_per_s(self) -> float:
        reference = classes_of(self._mine)[0]
        return MISS_PRICE * reference.price / 3600.0

    def _mode(self, offered: ClassPlan) -> ModeChoice:
        modes = MODES if self._plan.start_mode == AUTO else (self._plan.start_mode,)
        return choose_mode(
            [
                ModeOffer(
                    mode,
                    (known := self._ready(offered.worker_class, mode)).p50_s,
                    slowness(offered.profile, mode),
                    known.count,
                    self._why_not(mode),
                )
                for mode in modes
            ],
            price_per_s=offered.price / 3600.0,
            life_s=self.life_s,
            in_time_s=self.in_time_s,
            missed_per_s=MISS_PRICE * offered.price / 3600.0,
        )

    def _why_not(self, mode: str) -> str:
        if mode != "aot" or self._plan.start_mode != AUTO or "aot" in self._plan.compiled:
            return ""
        return "nothing was compiled ahead for this model"

    def _ready(self, worker_class: str, mode: str = "") -> StartQuantiles:
        wanted = mode or self.modes[worker_class].mode
        key = start_key(self._pool.name, worker_class, wanted)
        return self._observation.t_ready.get(key, self._t_ready)

    def _more(self) -> Pick:
        """Whatever else is started: the cheapest that can be had for what it is worth."""
        had = [o for o in self.offers if o.room > 0 and o.rate > 0]
        if not had:
            return self._pick(self._mine.worker_class)
        return self._pick(min(had, key=lambda o: (o.cost / o.rate, o.worker_class)).worker_class)

    # ------------------------------------------------------------------ words

    def _pick(self, name: str) -> Pick:
        mode = self.modes.get(name)
        usual = plain(self._plan, self._pool.name).more.mode
        return Pick(name, usual if mode is None else mode.mode)

    def _why(self, name: str) -> str:
        parts = []
        if len(self.offers) > 1:
            parts.append(f"{name} {'; '.join(self._priced(o) for o in self.offers)}")
        if self._plan.start_mode == AUTO and name in self.modes:
            parts.append(f"{self.modes[name].mode} {self.modes[name].why}")
        return "; ".join(parts)

    def _priced(self, offer: Offer) -> str:
        if offer.rate <= 0:
            return f"{offer.worker_class} cannot keep the targets"
        each = offer.cost / offer.rate
        text = f"{offer.worker_class} {each:.3g} for a {self._mine.worker_class}'s work"
        if not offer.room:
            return f"{text}, not to be had or too dear"
        return f"{text} (worth {offer.rate:.2g})"

    def _explain(self, found: Mix, wanted: float, said: list[Reason]) -> None:
        if found.missing > ROUND:
            name = self._pool.name
            text = (
                f"{wanted:.1f} workers' worth of {self._mine.worker_class} is wanted, quotas, "
                f"refusals and budget leave {found.missing:.1f} of it missing"
            )
            said.append(Reason("short", text, name))


def _not_dear(offers: Sequence[Offer]) -> list[Offer]:
    """The offers without room for those whose work costs far more than that of another one."""
    ratios = [o.cost / o.rate for o in offers if o.rate > 0 and o.room > 0]
    most = DEAR * min(ratios, default=0.0)
    return [
        replace(o, room=0) if o.room and o.rate > 0 and o.cost / o.rate > most and not o.owed else o
        for o in offers
    ]


def expected_life_s(memory: Memory, name: str, *, bound_s: float | None = None) -> float:
    """How long the next capacity of a pool is expected to serve: as long as what was given up did.

    Args:
        bound_s: what is there only for a backlog goes when that is worked off.
    """
    seen = [life_s for pool, life_s in memory.lives if pool == name]
    life_s = (LIFE_COUNT * LIFE_S + sum(seen)) / (LIFE_COUNT + len(seen))
    return life_s if bound_s is None else min(life_s, bound_s)
