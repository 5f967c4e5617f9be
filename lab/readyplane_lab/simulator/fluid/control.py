"""The planner's side of a fluid run: it is shown the state, decides, and what it said is kept.

Owns the brain's memory, measured starts, and the record of a run: targets, series, decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from readyplane.core.startup import StartMode, StartQuantiles, StartSample
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_lab.simulator.fluid.floor import Floor
from readyplane_lab.simulator.fluid.options import FluidOptions
from readyplane_lab.simulator.fluid.view import View, outlying, stuck, unanswered
from readyplane_planner.decide import POOLS, ROLE_OF, Decision, Memory, Plan, decide
from readyplane_planner.journal import decision_document
from readyplane_planner.policy import Policy
from readyplane_planner.signals import Observation, Refusal
from readyplane_planner.starts import StartBook

SAMPLE_EVERY_S = 5.0
ENDED_SHOWN_S = 60.0


class Control:
    """One planner over one run.

    Attributes:
        targets: (second, prefill, decode) whenever one moved. documents: of decisions that changed
            something. planner_s: CPU seconds of each tick. refused: orders not taken since the
            last tick. blind_until_s: no answer of the router before then; stuck_until_s: the same
            again and again. outlier: factor of the demand that the next look tells of.
    """

    def __init__(self, options: FluidOptions, policy: Policy, plan: Plan) -> None:
        self.targets: list[tuple[float, int, int]] = []
        self.documents: list[dict[str, Any]] = []
        self.planner_s: list[float] = []
        self.refused: list[Refusal] = []
        self.blind_until_s = -inf
        self.stuck_until_s = -inf
        self.outlier: float | None = None
        self._options = options
        self._policy = policy
        self._plan = plan
        self._brain = options.brain or decide
        self._memory = Memory()
        self._last: Observation | None = None
        self._book = StartBook()
        self._starts: list[FluidWorker] = []
        self._view = View(plan, policy.priors, uptime_s=0.0)
        self._rows: list[dict[str, Any]] = []
        self._ticks = 0
        self._sampled_s = -SAMPLE_EVERY_S

    def begin(self, uptime_s: float) -> None:
        """The router has run for so long when the first request arrives."""
        self._view = View(self._plan, self._policy.priors, uptime_s=uptime_s)

    def started(self, worker: FluidWorker) -> None:
        """A worker has become ready; its start is known from the next tick on."""
        self._starts.append(worker)

    def forget(self) -> None:
        """Another planner begins: it knows how long starts took, and nothing else."""
        self._memory = Memory()
        self._view.begin()

    def tick(self, now_s: float, floor: Floor) -> Decision:
        """Look and decide."""
        self._learn(now_s)
        observation = self._look(now_s, floor)
        self.refused = []
        timer = self._options.timer
        began_s = 0.0 if timer is None else timer()
        decision, self._memory = self._brain(
            observation,
            self._plan,
            self._memory,
            now_s=now_s,
            decision_id=f"d{round(now_s)}-{self._ticks:06x}",
        )
        if timer is not None:
            self.planner_s.append(timer() - began_s)
        self._ticks += 1
        self._note(decision, observation, now_s)
        return decision

    def _look(self, now_s: float, floor: Floor) -> Observation:
        ended = floor.ended
        while ended and now_s - (ended[0].released_s or 0.0) > ENDED_SHOWN_S:
            ended.pop(0)
        observation = self._view.observe(
            now_s,
            floor.now(now_s),
            floor.rows.totals,
            fleet=floor.fleet.values(),
            ended=ended,
            batches=floor.batches(),
            lengths=floor.rows.lengths,
            windows=floor.rows.windows,
            refused=self.refused,
            t_ready={name: self._quantiles(name, now_s) for name in POOLS},
        )
        if now_s < self.blind_until_s and self._last is not None:
            return unanswered(self._last, observation, self._policy.priors)
        if now_s < self.stuck_until_s and self._last is not None:
            return stuck(self._last, observation)
        self._last = observation
        if self.outlier is not None:
            observation, self.outlier = outlying(observation, self.outlier), None
        return observation

    def _quantiles(self, name: str, now_s: float) -> StartQuantiles:
        return self._book.quantiles(
            ROLE_OF[name],
            worker_class=self._plan.pool(name).worker_class,
            mode=self._plan.start_mode,
            prior=self._policy.t_ready,
            now_s=now_s,
        )

    def counts(self) -> dict[str, float]:
        """What can be counted of the planner."""
        memory = self._memory
        return {
            "guard_overrides": float(sum(memory.overrides.values())),
            "fallbacks": float(memory.fallbacks),
            "decisions": float(self._ticks),
        }

    def series(self) -> dict[str, Sequence[Any]]:
        """Columns by name."""
        names = self._rows[0] if self._rows else ()
        return {name: [row[name] for row in self._rows] for name in names}

    def _learn(self, now_s: float) -> None:
        """Samples of the starts that have ended since the last tick."""
        for worker in self._starts:
            if worker.loaded_s is None:
                continue
            sample = StartSample(
                worker.profile.worker_class,
                worker.tier,
                StartMode(self._plan.start_mode),
                0.0,
                worker.loaded_s - worker.allocated_s,
                now_s,
            )
            self._book.add(ROLE_OF[worker.pool], sample)
        self._starts.clear()

    def _note(self, decision: Decision, observation: Observation, now_s: float) -> None:
        wanted = (decision.prefill.target, decision.decode.target)
        if not self.targets or self.targets[-1][1:] != wanted:
            self.targets.append((now_s, *wanted))
        if not self._options.record:
            return
        if decision.changed:
            document = decision_document(decision, at_s=now_s, leader_epoch=1, inputs_digest="")
            self.documents.append(document)
        if now_s - self._sampled_s < SAMPLE_EVERY_S - 1e-6:
            return
        self._sampled_s = now_s
        row: dict[str, Any] = {"t_s": now_s, "open": observation.in_flight.get()}
        for name in POOLS:
            pool = decision.pool(name)
            row[f"{name}.desired"] = pool.target
            mine = [w for w in observation.workers if w.role is ROLE_OF[name]]
            row[f"{name}.provisioned"] = sum(
                a.role is ROLE_OF[name] and a.state == "running" for a in observation.allocations
            )
            row[f"{name}.ready"] = sum(w.state == "ready" for w in mine)
            row[f"{name}.load"] = pool.load.value
        row["prefill.queue_tokens"] = observation.queue.value
        row["decode.queue_tokens"] = observation.remaining.value
        for name in ("ttft", "tpot"):
            actual = observation.latency[f"{name}_actual"]
            row[f"{name}.p90_s"] = actual.p90_s if actual.count else None
        self._rows.append(row)
