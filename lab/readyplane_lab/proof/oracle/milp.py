"""The clairvoyant optimum where pools are not alone: classes, coupling, role flips and a budget.

A time-expanded mixed-integer programme on a coarse grid (60 s, up to a day). What `layers` solves
exactly for one pool of one class is here one case of several: worker classes that do unequal work
at unequal prices, a quota of each, a budget over all, KV that D must be able to hold and links must
be able to carry, workers that change their role, a most a step may change, a least time a worker
stays. Its relaxation is a lower bound whenever the solver stops early; the gap is told.

A worker of class c in pool k at step t is one of `x`; `u` become ready and `v` leave at its
beginning, `r` turn from prefill to decode and `q` back. A start is billed for its lead and its
drain; it is ordered `lead` steps before it is ready, and fills its place in budget and quota from
then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, diags_array, eye_array, vstack

from readyplane_lab.simulator.outcome import Floats

POOLS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Kind:
    """A worker class.

    Attributes:
        prefill, decode: workers of the needs' class that one of it replaces; 0 where it is unfit.
        lead_s: order to ready. drain_s: billed after the last use. initial: ready at the beginning.
        kv_tokens: held by one in the decode pool. link_bytes_per_s: in and out of one.
        quota: most at a time, those that start included.
    """

    name: str
    gpus: int
    price_per_gpu_hour: float
    prefill: float
    decode: float
    lead_s: float
    drain_s: float = 0.0
    initial: tuple[int, int] = (0, 0)
    kv_tokens: float = np.inf
    link_bytes_per_s: float = np.inf
    quota: int | None = None

    def able(self, pool: int) -> float:
        """What one of it does in a pool."""
        return (self.prefill, self.decode)[pool]

    @property
    def per_second(self) -> float:
        """Price of one worker."""
        return self.gpus * self.price_per_gpu_hour / 3600.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be there in each step: columns of one length.

    Attributes:
        prefill, decode: workers, not rounded. kv_tokens: resident in the decode pool.
        kv_bytes_per_s: handed over from P to D. None: no matter.
    """

    step_s: float
    prefill: Floats
    decode: Floats
    kv_tokens: Floats | None = None
    kv_bytes_per_s: Floats | None = None

    def of(self, pool: int) -> Floats:
        """Workers of a pool."""
        return (self.prefill, self.decode)[pool]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a plan must keep to.

    Attributes:
        budget_gpus: at a time, starting ones included. step_most: workers that one pool may gain by
            starts, and as many that it may lose by stops, in a step.
        dwell_steps: a worker that has become ready stays in its pool at least so long.
        flip_s: billed for a change of role, about the time in which it does not serve; None: roles
            do not change. ahead: whether a worker may be ready before a start from 0 on could be.
    """

    budget_gpus: int | None = None
    step_most: int | None = None
    dwell_steps: int = 0
    flip_s: float | None = None
    ahead: bool = True


@dataclass(frozen=True, slots=True)
class Solved:
    """The best plan found.

    Attributes:
        workers: by (class, pool) of each step. starts, flips: how many.
        cost: price of it all. relaxed: of the linear relaxation, a lower bound.
        bound: the best lower bound that the solver proved.
    """

    workers: dict[tuple[str, str], Floats]
    starts: int
    flips: int
    cost: float
    relaxed: float
    bound: float

    @property
    def gap(self) -> float:
        """Share of the cost that may be above the optimum."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost else 0.0


def solve(
    kinds: Sequence[Kind],
    needs: Needs,
    rules: Rules,
    *,
    time_limit_s: float = 60.0,
    rel_gap: float = 1e-4,
) -> Solved:
    """Find the cheapest plan.

    Raises:
        ArithmeticError: no plan keeps to the rules, or none was found in time.
    """
    model = _Model(len(needs.prefill))
    columns = _columns(model, kinds, needs, rules)
    _cover(model, kinds, columns, needs)
    _limit(model, kinds, columns, needs, rules)
    _stay(model, columns, rules)
    relaxed = model.run(whole=False, time_limit_s=time_limit_s, rel_gap=rel_gap)
    found = model.run(whole=True, time_limit_s=time_limit_s, rel_gap=rel_gap)
    values = np.round(found.x, 6)
    flips = (*columns.out.values(), *columns.back.values())
    return Solved(
        workers={
            (kind.name, POOLS[pool]): values[columns.held[kind.name, pool]]
            for kind in kinds
            for pool in (0, 1)
            if (kind.name, pool) in columns.held
        },
        starts=round(sum(float(values[c].sum()) for c in columns.start.values())),
        flips=round(sum(float(values[c].sum()) for c in flips)),
        cost=float(found.fun),
        relaxed=float(relaxed.fun),
        bound=max(float(relaxed.fun), float(found.mip_dual_bound)),
    )


Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the variables lie, by (class, pool), and by class for flips."""

    held: dict[Key, slice]
    start: dict[Key, slice]
    stop: dict[Key, slice]
    out: dict[str, slice]
    back: dict[str, slice]


class _Model:
    """Columns in blocks of one a step, rows in blocks likewise."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.one = eye_array(steps)
        self.change = diags_array([np.ones(steps), -np.ones(steps - 1)], offsets=[0, -1])
        self._cost: list[Floats] = []
        self._whole: list[Floats] = []
        self._most: list[Floats] = []
        self._rows: list[tuple[dict[int, object], Floats, Floats]] = []

    def add(self, cost: float, *, whole: bool, most: Floats | None = None) -> slice:
        """A block of columns of at least 0."""
        begin = len(self._cost) * self.steps
        self._cost.append(np.full(self.steps, cost))
        self._whole.append(np.full(self.steps, float(whole)))
        self._most.append(np.full(self.steps, np.inf) if most is None else most)
        return slice(begin, begin + self.steps)

    def require(
        self, terms: Sequence[tuple[slice, object]], low: Floats | float, high: Floats | float
    ) -> None:
        """Rows: the sum of matrix times block, between two bounds."""
        blocks: dict[int, object] = {}
        for columns, matrix in terms:
            at = columns.start
            blocks[at] = matrix if at not in blocks else blocks[at] + matrix  # type: ignore[operator]
        ends = [np.broadcast_to(np.asarray(v, dtype=float), self.steps) for v in (low, high)]
        self._rows.append((blocks, ends[0], ends[1]))

    def run(self, *, whole: bool, time_limit_s: float, rel_gap: float) -> _Found:
        """Solve it, or its relaxation."""
        width = len(self._cost) * self.steps
        parts = []
        for blocks, _low, _high in self._rows:
            cells = [(at, coo_array(matrix)) for at, matrix in blocks.items()]
            parts.append(
                coo_array(
                    (
                        np.concatenate([m.data for _at, m in cells]),
                        (
                            np.concatenate([m.row for _at, m in cells]),
                            np.concatenate([m.col + at for at, m in cells]),
                        ),
                    ),
                    shape=(self.steps, width),
                )
            )
        limits = LinearConstraint(
            vstack(parts, format="csr"),
            np.concatenate([low for _blocks, low, _high in self._rows]),
            np.concatenate([high for _blocks, _low, high in self._rows]),
        )
        found: _Found = milp(
            np.concatenate(self._cost),
            integrality=np.concatenate(self._whole) if whole else None,
            bounds=Bounds(np.zeros(width), np.concatenate(self._most)),
            constraints=limits,
            options={"time_limit": time_limit_s, "mip_rel_gap": rel_gap},
        )
        if found.x is None:
            raise ArithmeticError(f"no plan was found: {found.message}")
        return found


class _Found:
    """What `scipy.optimize.milp` answers, in types."""

    x: Floats
    fun: float
    mip_dual_bound: float
    message: str


def _columns(model: _Model, kinds: Sequence[Kind], needs: Needs, rules: Rules) -> _Columns:
    """Variables, and how the fleet of one step comes from that of the step before."""
    columns = _Columns({}, {}, {}, {}, {})
    for kind in kinds:
        late = np.full(model.steps, np.inf)
        if not rules.ahead:
            late[: _lead(kind, needs)] = 0.0
        begin_cost = kind.per_second * (kind.lead_s + kind.drain_s)
        for pool in (0, 1):
            if kind.able(pool) > 0:
                key = (kind.name, pool)
                columns.held[key] = model.add(kind.per_second * needs.step_s, whole=True)
                columns.start[key] = model.add(begin_cost, whole=False, most=late)
                columns.stop[key] = model.add(0.0, whole=False)
        if rules.flip_s is not None and kind.prefill > 0 and kind.decode > 0:
            for flips in (columns.out, columns.back):
                flips[kind.name] = model.add(kind.per_second * rules.flip_s, whole=True)
    for kind in kinds:
        for pool, sign in ((0, 1.0), (1, -1.0)):
            key = (kind.name, pool)
            if key not in columns.held:
                continue
            terms = [
                (columns.held[key], model.change),
                (columns.start[key], -model.one),
                (columns.stop[key], model.one),
            ]
            if kind.name in columns.out:
                terms.append((columns.out[kind.name], sign * model.one))
                terms.append((columns.back[kind.name], -sign * model.one))
            before = np.zeros(model.steps)
            before[0] = kind.initial[pool]
            model.require(terms, before, before)
    return columns


def _cover(model: _Model, kinds: Sequence[Kind], columns: _Columns, needs: Needs) -> None:
    """What must be there: work, KV memory, links on both sides."""

    def at_least(pool: int, each: dict[str, float], least: Floats) -> None:
        enough = float(least.max(initial=0.0))  # where a class has no limit, one worker suffices
        terms = [
            (columns.held[name, pool], min(value, enough) * model.one)
            for name, value in each.items()
            if (name, pool) in columns.held
        ]
        if terms:
            model.require(terms, least, np.inf)
        elif enough > 0:
            raise ArithmeticError(f"no class is fit for the {POOLS[pool]} pool")

    for pool in (0, 1):
        at_least(pool, {k.name: k.able(pool) for k in kinds}, needs.of(pool))
        if needs.kv_bytes_per_s is not None:
            at_least(pool, {k.name: k.link_bytes_per_s for k in kinds}, needs.kv_bytes_per_s)
    if needs.kv_tokens is not None:
        at_least(1, {k.name: k.kv_tokens for k in kinds}, needs.kv_tokens)


def _limit(
    model: _Model, kinds: Sequence[Kind], columns: _Columns, needs: Needs, rules: Rules
) -> None:
    """What must not be exceeded: budget, quotas and the size of a step."""

    def with_starting(kind: Kind, factor: float) -> list[tuple[slice, object]]:
        ahead = range(1, min(_lead(kind, needs), model.steps - 1) + 1)
        coming = 0.0 * model.one
        if ahead:
            ones = [np.ones(model.steps - k) for k in ahead]
            coming = diags_array(ones, offsets=list(ahead), shape=model.one.shape)
        terms: list[tuple[slice, object]] = []
        for pool in (0, 1):
            if (kind.name, pool) in columns.held:
                terms.append((columns.held[kind.name, pool], factor * model.one))
                terms.append((columns.start[kind.name, pool], factor * coming))
        return terms

    if rules.budget_gpus is not None:
        terms = [term for kind in kinds for term in with_starting(kind, float(kind.gpus))]
        model.require(terms, -np.inf, float(rules.budget_gpus))
    for kind in kinds:
        if kind.quota is not None:
            model.require(with_starting(kind, 1.0), -np.inf, float(kind.quota))
    for pool in (0, 1):
        if rules.step_most is not None:
            for group in (columns.start, columns.stop):
                terms = [(c, model.one) for (_name, p), c in group.items() if p == pool]
                if terms:
                    model.require(terms, -np.inf, float(rules.step_most))


def _stay(model: _Model, columns: _Columns, rules: Rules) -> None:
    """Who has become ready within the last `dwell_steps` is still there."""
    steps = range(min(rules.dwell_steps, model.steps))
    if len(steps) > 1:
        ones = [np.ones(model.steps - k) for k in steps]
        recent = diags_array(ones, offsets=[-k for k in steps])
        for key, held in columns.held.items():
            model.require([(held, model.one), (columns.start[key], -recent)], 0.0, np.inf)


def _lead(kind: Kind, needs: Needs) -> int:
    """Steps from order to ready."""
    return int(np.ceil(kind.lead_s / needs.step_s - 1e-9))
