"""A pool as it really is: who is ready, on the way, overdue, draining, failed or left behind.

Desired is compared with what is observed, never with itself (B41). A worker on its way counts as
arriving capacity until the bound of its ETA has passed, then no more (B20, B36).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import WorkerState
from readyplane_planner.decide import fast
from readyplane_planner.decide.values import (
    ROLE_OF,
    Changing,
    Memory,
    OpenOrder,
    Plan,
    Release,
    start_key,
)
from readyplane_planner.guard import Counts
from readyplane_planner.signals import Allocation, Observation, WorkerView

SOON_SHARE = 0.5
ENDED = frozenset({"exited", "failed"})


@dataclass(frozen=True, slots=True)
class Coming:
    """A worker on its way: seconds since its order, the artifact and whether an agent runs.

    One that is activated or changes its stage has that as its mode, and its age since it was told.
    """

    worker_id: str
    age_s: float
    digest: str = ""
    number: int = 0
    attached: bool = False
    worker_class: str = ""
    mode: str = ""
    decision_id: str = ""


@dataclass(slots=True)
class Pool:
    """The members of one pool by what they are. Built here, read-only afterwards.

    `standby`: proved and waiting to be told; `preparing`: such ones on their way.
    `worth`: reference workers by "class/mode", where there is more than one; see `mixing`.
    """

    name: str
    ready: list[WorkerView] = field(default_factory=list)
    unpairable: list[WorkerView] = field(default_factory=list)
    coming: list[Coming] = field(default_factory=list)
    draining: list[WorkerView] = field(default_factory=list)
    stalled: list[WorkerView] = field(default_factory=list)
    standby: list[WorkerView] = field(default_factory=list)
    preparing: list[Coming] = field(default_factory=list)
    overdue: list[Coming] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    became_ready: int = 0
    worth: Mapping[str, float] = field(default_factory=dict)
    _sums: tuple[float, float] | None = None

    def worth_of(self, member: WorkerView | Coming) -> float:
        """Workers of the reference class that a member is worth."""
        return self.worth.get(f"{member.worker_class}/{member.mode}", 1.0) if self.worth else 1.0

    @property
    def ready_worth(self) -> float:
        """What the ready are worth."""
        return self._worths()[0] if self.worth else len(self.ready)

    @property
    def live_worth(self) -> float:
        """What `live` is worth."""
        return self._worths()[1] if self.worth else self.live

    def _worths(self) -> tuple[float, float]:
        if self._sums is None:
            ready = sum(map(self.worth_of, self.ready))
            self._sums = ready, sum(map(self.worth_of, self.members))
        return self._sums

    @property
    def members(self) -> list[WorkerView | Coming]:
        """Everyone whom `live` counts."""
        return [*self.ready, *self.coming, *self.waiting]

    @property
    def waiting(self) -> list[WorkerView]:
        """Own workers that wait for a partner: no supply, yet not to be ordered a second time."""
        return [w for w in self.unpairable if not w.attached]

    @property
    def live(self) -> int:
        """Workers that serve or will: ready, on their way, or waiting for a partner."""
        return len(self.ready) + len(self.coming) + len(self.waiting)

    def counts(self, *, backlog: bool, breach: bool) -> Counts:
        """In the guard's words."""
        return Counts(
            ready=len(self.ready),
            pending=len(self.coming) + len(self.waiting),
            draining=len(self.draining) + len(self.stalled),
            expired=len(self.overdue),
            backlog=backlog,
            breach=breach,
            standby=len(self.standby) + len(self.preparing),
        )


def quantiles_of(observation: Observation, pool: str, member: Coming) -> StartQuantiles:
    """T_ready of a start as it was ordered, where classes and modes are told apart."""
    key = start_key(pool, member.worker_class, member.mode)
    usual = fast.PRIORS.get(member.mode, observation.t_ready[pool])
    return observation.t_ready.get(key, usual)


def eta_s(age_s: float, quantiles: StartQuantiles, *, late: bool) -> float:
    """Seconds until a worker ordered `age_s` ago serves: the median, or with `late` the P90.

    A start that has outlived a quantile is expected at the next one; beyond the last it is 'any
    moment', which still is not now.
    """
    marks = (quantiles.p50_s, quantiles.p90_s, quantiles.p99_s)
    for mark in marks[1:] if late else marks:
        if age_s < mark:
            return mark - age_s
    return max(1.0, 0.25 * quantiles.p99_s)


def arrives_soon(age_s: float, quantiles: StartQuantiles) -> float | None:
    """Seconds until a start is expected when that is so near that cancelling it wastes it.

    None when it is further away, or later than its P90 and perhaps not coming at all.
    """
    if age_s >= quantiles.p90_s:
        return None
    left_s = eta_s(age_s, quantiles, late=False)
    return left_s if left_s <= SOON_SHARE * quantiles.p50_s else None


def not_draining(observation: Observation, memory: Memory) -> Memory:
    """A drain that was not taken is no drain: the worker counts as it stands, ready (B35).

    Nor is one of a process that is gone, when another one serves under its name: nobody has told
    that one to leave. Nor is a worker told any more what it has done, or would not do.
    """
    memory = fast.settled(observation, memory)
    drained = dict(memory.draining_as)
    over = {r.worker_id for r in observation.refused}
    over |= {
        w.worker_id
        for w in observation.workers
        if drained.get(w.worker_id, w.incarnation) != w.incarnation
    }
    if not over:
        return memory
    return replace(
        memory,
        draining=tuple(d for d in memory.draining if d[0] not in over),
        draining_as=tuple(d for d in memory.draining_as if d[0] not in over),
    )


def census(
    name: str, observation: Observation, plan: Plan, memory: Memory, *, now_s: float
) -> Pool:
    """Sort everything that is known of a pool."""
    pool, role = Pool(name), ROLE_OF[name]
    view = _View(
        orders={o.worker_id: o for o in memory.orders if o.pool == name},
        draining=dict(memory.draining),
        drain_bound_s=plan.drain_deadline_s + plan.orphan_s,
        served=set(memory.served),
        suspects=dict(memory.suspects),
        bound_s=observation.t_ready[name].p99_s * plan.eta_bound_factor,
        bounds_s={
            key: starts.p99_s * plan.eta_bound_factor
            for key, starts in observation.t_ready.items()
            if key.startswith(f"{name}/")
        },
        orphan_s=plan.orphan_s,
        fleet_known=observation.fleet_known,
        now_s=now_s,
        changing=fast.changes(observation, memory),
    )
    allocations = {a.worker_id: a for a in observation.allocations}
    held = {name: a for name, a in allocations.items() if a.role.serves(role)}
    seen = {w.worker_id for w in observation.workers}  # in one stage or the other
    for worker in observation.workers:
        if worker.role.serves(role):
            _place(pool, worker, allocations.get(worker.worker_id), view)
    _turning(pool, observation.workers, allocations, view)
    for worker_id, allocation in held.items():
        if worker_id not in seen and not view.flips(worker_id):
            _without_lease(pool, allocation, view)
    for worker_id, order in view.orders.items():
        if worker_id in seen or worker_id in held:
            continue
        age_s = now_s - order.ordered_s
        if not observation.allocations_known or age_s < plan.order_grace_s:
            digest = order.digest or plan.manifest_digest
            number, worker_class = order.number, order.worker_class
            coming = Coming(
                worker_id,
                age_s,
                digest,
                number,
                False,
                worker_class,
                order.mode,
                order.decision_id,
            )
            (pool.preparing if order.standby else pool.coming).append(coming)
        else:
            pool.failed.append(worker_id)
    refused = {r.worker_id for r in observation.refused if r.pool == name} & view.orders.keys()
    # What is held was taken, whatever became of the answer to its order.
    refused -= held.keys() | seen
    pool.coming = [c for c in pool.coming if c.worker_id not in refused]
    pool.preparing = [c for c in pool.preparing if c.worker_id not in refused]
    pool.failed.extend(sorted(refused - set(pool.failed)))
    pool.became_ready = sum(1 for w in pool.ready if w.worker_id in view.orders)
    return pool


@dataclass(slots=True)
class _View:
    """What memory and plan say while sorting; read-only."""

    orders: dict[str, OpenOrder]
    draining: dict[str, float]
    drain_bound_s: float
    served: set[str]
    suspects: dict[str, float]
    bound_s: float
    bounds_s: Mapping[str, float]
    orphan_s: float
    fleet_known: bool
    now_s: float
    changing: Mapping[str, Changing]

    def told(self, worker_id: str, kind: str) -> Changing | None:
        """What a worker was told and has not done, if it is of that kind."""
        found = self.changing.get(worker_id)
        return found if found is not None and found.kind == kind else None

    def flips(self, worker_id: str) -> bool:
        """Whether it is on its way to the other stage."""
        return self.told(worker_id, fast.FLIP) is not None

    def bound_of(self, name: str, member: WorkerView | Allocation) -> float:
        """Seconds after which a start is overdue."""
        key = start_key(name, member.worker_class, member.mode)
        return self.bounds_s.get(key, self.bound_s) if self.bounds_s else self.bound_s

    def given_up(self, worker_id: str) -> bool:
        """Suspect for longer than the bound, while the router could be asked."""
        since_s = self.suspects.get(worker_id, self.now_s)
        return self.fleet_known and self.now_s - since_s >= self.orphan_s


def _place(pool: Pool, worker: WorkerView, allocation: Allocation | None, view: _View) -> None:
    """One worker that the router knows."""
    name = worker.worker_id
    flip, word = view.told(name, fast.FLIP), view.told(name, fast.ACTIVATE)
    if flip is not None and flip.to != pool.name and name not in view.draining:
        pool.draining.append(worker)
    elif worker.state is WorkerState.DRAINING or name in view.draining:
        _leaving(pool, worker, allocation, view)
    elif worker.state is WorkerState.READY:
        (pool.unpairable if worker.unpairable else pool.ready).append(worker)
    elif worker.state is WorkerState.STANDBY:
        if word is None:
            pool.standby.append(worker)
        else:
            pool.coming.append(_told(worker, word, view))
    elif worker.state is WorkerState.STALLED:
        pool.stalled.append(worker)
        pool.suspects.append(name)
        if view.given_up(name) and allocation is not None:
            pool.releases.append(Release(name, pool.name, "stalled: no progress"))
    elif name in view.served and not worker.failure and not _ended(allocation):
        _rejoining(pool, worker, allocation, view)
    else:
        _starting(pool, worker, allocation, view, standby=worker.standby and word is None)


def _rejoining(pool: Pool, worker: WorkerView, allocation: Allocation | None, view: _View) -> None:
    """One that served, lost its lease and is being admitted anew: it is no start that is late.

    How long it has been allocated says nothing of that; it has the time of a start from when it was
    first seen without its lease, and is expected as soon as one that was activated.
    """
    name = worker.worker_id
    age_s = view.now_s - view.suspects.get(name, view.now_s)
    pool.suspects.append(name)
    coming = Coming(
        name,
        age_s,
        worker.manifest_digest,
        worker.generation,
        worker.attached,
        worker.worker_class,
        fast.ACTIVATE,
    )
    if age_s <= view.bound_of(pool.name, worker):
        pool.coming.append(coming)
        return
    pool.overdue.append(coming)
    if allocation is not None:
        text = f"it served and was not admitted again within {age_s:.1f} s"
        pool.releases.append(Release(name, pool.name, text))


def _ended(allocation: Allocation | None) -> bool:
    return allocation is not None and allocation.state in ENDED


def _leaving(pool: Pool, worker: WorkerView, allocation: Allocation | None, view: _View) -> None:
    pool.draining.append(worker)
    since_s = view.draining.get(worker.worker_id, view.now_s)
    # A start that was cancelled has nothing to serve out: its release was lost.
    unserved = worker.state in {WorkerState.PROVISIONED, WorkerState.STANDBY}
    bound_s = view.orphan_s if unserved else view.drain_bound_s
    if allocation is not None and view.now_s - since_s > bound_s:
        text = f"still draining after {view.now_s - since_s:.1f} s"
        pool.releases.append(Release(worker.worker_id, pool.name, text))


def _starting(
    pool: Pool, worker: WorkerView, allocation: Allocation | None, view: _View, *, standby: bool
) -> None:
    """One whose start is under way, too late, or has failed."""
    order = view.orders.get(worker.worker_id)
    age_s = 0.0
    if order is not None:
        age_s = view.now_s - order.ordered_s
    if allocation is not None and not view.flips(worker.worker_id):
        age_s = allocation.allocated_ago_s
    coming = Coming(
        worker.worker_id,
        age_s,
        worker.manifest_digest,
        worker.generation,
        worker.attached,
        worker.worker_class,
        worker.mode,
        worker.scale_decision_id,
    )
    if worker.failure or (allocation is not None and allocation.state in ENDED):
        pool.failed.append(worker.worker_id)
        why = worker.failure or allocation_end(allocation)
        if allocation is not None and allocation.state not in ENDED:
            pool.releases.append(Release(worker.worker_id, pool.name, f"start failed: {why}"))
    elif age_s > (bound_s := view.bound_of(pool.name, worker)):
        pool.overdue.append(coming)
        if allocation is not None:
            text = f"not ready after {age_s:.1f} s, bound {bound_s:.1f} s"
            pool.releases.append(Release(worker.worker_id, pool.name, text))
    else:
        (pool.preparing if standby else pool.coming).append(coming)


def _told(worker: WorkerView, word: Changing, view: _View) -> Coming:
    """A worker that serves, or serves this stage, shortly after it was told."""
    return Coming(
        worker.worker_id,
        max(0.0, view.now_s - word.since_s),
        worker.manifest_digest,
        worker.generation,
        worker.attached,
        worker.worker_class,
        fast.LOAD if worker.bare and word.kind == fast.ACTIVATE else word.kind,
    )


def _turning(
    pool: Pool,
    workers: Iterable[WorkerView],
    allocations: Mapping[str, Allocation],
    view: _View,
) -> None:
    """Whoever comes from the other stage: still draining there, or between its two leases."""
    role = ROLE_OF[pool.name]
    by_id = {w.worker_id: w for w in workers}
    for worker_id, word in view.changing.items():
        if word.kind != fast.FLIP or word.to != pool.name or worker_id in view.draining:
            continue
        worker, allocation = by_id.get(worker_id), allocations.get(worker_id)
        if worker is not None:
            if not worker.role.serves(role):
                pool.coming.append(_told(worker, word, view))
        elif allocation is not None and allocation.state not in ENDED:
            age_s = max(0.0, view.now_s - word.since_s)
            digest, number = allocation.manifest_digest, allocation.generation
            pool.coming.append(
                Coming(worker_id, age_s, digest, number, False, allocation.worker_class, word.kind)
            )


def _without_lease(pool: Pool, allocation: Allocation, view: _View) -> None:
    """One allocation that the router does not know: not yet, no more, or never again.

    A router that has just begun knows nobody: such a worker is expected back until it has been
    unknown for `orphan_s` to a router that could be asked, and only then given up.
    """
    worker_id = allocation.worker_id
    if allocation.state in ENDED:
        if worker_id in view.orders:
            pool.failed.append(worker_id)
        return
    coming = Coming(
        worker_id,
        allocation.allocated_ago_s,
        allocation.manifest_digest,
        allocation.generation,
        False,
        allocation.worker_class,
        allocation.mode,
        allocation.scale_decision_id,
    )
    if worker_id in view.draining:
        pool.overdue.append(coming)
        if view.fleet_known and view.now_s - view.draining[worker_id] >= view.orphan_s:
            why = "drained and gone from the router"
            pool.releases.append(Release(worker_id, pool.name, why))
        return
    if worker_id not in view.served and allocation.allocated_ago_s <= view.bound_of(
        pool.name, allocation
    ):
        (pool.preparing if allocation.standby else pool.coming).append(coming)
        return
    pool.suspects.append(worker_id)
    if view.given_up(worker_id):
        known = worker_id in view.served
        why = "orphan: it served and has no lease" if known else "orphan: it never came up"
        pool.releases.append(Release(worker_id, pool.name, why))
        pool.overdue.append(coming)
    else:
        pool.coming.append(coming)


def allocation_end(allocation: Allocation | None) -> str:
    """How an allocation ended, in words."""
    if allocation is None:
        return "unknown"
    code = "" if allocation.exit_code is None else f" with code {allocation.exit_code}"
    return f"{allocation.state}{code} {allocation.reason}".strip()
