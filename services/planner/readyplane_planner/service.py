"""The planner's use-cases over its ports: tick, state, decisions, explain, policy, pause.

Owns the loop that ties the pure decision to the world: look, decide, journal, act. Runs unchanged
in a process and in the simulator; everything it touches is handed in. Handed to rpc and api.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from readyplane.core.errors import ReadyplaneError, StaleEpoch, Unavailable
from readyplane.kit.clock import Clock
from readyplane.kit.decision_trace import export_decision
from readyplane.ports import Actuator, Router
from readyplane_planner.actuators import Hand, refusals
from readyplane_planner.decide import Decision, Memory, Plan, decide
from readyplane_planner.decide.follow import Brain
from readyplane_planner.explain import explanation
from readyplane_planner.fitting import UNANSWERED
from readyplane_planner.in_force import InForce
from readyplane_planner.journal import (
    Inputs,
    Journal,
    checked_id,
    record_of,
    row_of,
)
from readyplane_planner.judgement import totals_of
from readyplane_planner.leadership import Leadership
from readyplane_planner.metrics import PlannerMetrics
from readyplane_planner.optimisers import thinker
from readyplane_planner.outcomes import Follower, Judge
from readyplane_planner.places import Places, Resolver
from readyplane_planner.policy import Policy, make_plan
from readyplane_planner.recall import recall
from readyplane_planner.rollout import Told
from readyplane_planner.signals import Observation, RouterSample, observe, stands_still
from readyplane_planner.sources import Look, LooksBeyond, Sources, allocations
from readyplane_planner.standby_time import StandbyTime
from readyplane_planner.starts import StartBook, t_ready
from readyplane_planner.state import History, LastHeard, Seen, state_document, state_pools
from readyplane_planner.takeover import Succession
from readyplane_planner.thinking import ask, think
from readyplane_planner.undone import ASKED, undone
from readyplane_planner.upgrades import Upgrades
from readyplane_planner.upkeep import Upkeep
from readyplane_planner.worktime import WorkerSeconds

log = logging.getLogger(__name__)

DECISIONS_SHOWN = 30
WATCHERS_MAX = 64
LOOK_S_MAX = 5.0


class PlannerService:
    """See `readyplane.ports.Planner`.

    Args:
        policy: what is wanted until the journal holds a newer version.
        actuator: starts and stops workers; without one the planner is advisory: it plans, shows
            and explains, and orders, drains and releases nothing.
        registry: resolves the policy's manifest; None when the policy names a digest.
        make_id: unique text for decisions, a handful of letters and digits; deterministic in the
            simulator.
        brain: plans; another one stands in where planners are compared.
        beyond: sources beside the router, read in each look.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        router: Router,
        actuator: Actuator | None,
        registry: Resolver | None,
        journal: Journal,
        leadership: Leadership,
        clock: Clock,
        make_id: Callable[[], str],
        metrics: PlannerMetrics | None = None,
        upkeep: Upkeep | None = None,
        brain: Brain = decide,
        beyond: LooksBeyond | None = None,
    ) -> None:
        self._brain = brain
        self._digest = ""
        self._resolve_error = ""
        self._resolved_s: float | None = None
        self._registry = registry
        every_s = (upkeep or Upkeep()).resolve_every_s
        self._places = Places(registry, every_s=every_s, timeout_s=LOOK_S_MAX)
        self._journal = journal
        self._leadership = leadership
        self._clock = clock
        self._make_id = make_id
        self._metrics = metrics
        self._upkeep = upkeep or Upkeep()
        self._in_force = InForce(
            policy,
            journal,
            registry,
            clock=clock,
            every_s=self._upkeep.policy_every_s,
            changed=self._obey,
            rollout=self._rollout,
        )
        self._sources = Sources(
            router,
            actuator,
            model=policy.model,
            clock=clock,
            timeout_s=LOOK_S_MAX,
            beyond=beyond,
        )
        self._hand = Hand(
            router, actuator, model=policy.model, release_grace_s=self._upkeep.release_grace_s
        )
        self._book = StartBook()
        self._follower = Follower(self._book)
        self._stood = StandbyTime()
        self._judge = Judge()
        self._seconds = WorkerSeconds()
        self._memory = Memory()
        self._previous: RouterSample | None = None
        self._current: RouterSample | None = None
        self._history = History()
        self._heard = LastHeard()
        self._recent: deque[dict[str, Any]] = deque(maxlen=DECISIONS_SHOWN)
        self._last: Seen | None = None
        self._inputs: Inputs | None = None
        self._plans: tuple[tuple[int, str, bool], Plan] | None = None
        self._watchers: set[asyncio.Queue[dict[str, Any]]] = set()
        self._kept_s: float | None = None
        self._pruned_s: float | None = None
        self._kick = asyncio.Event()
        self._succession = Succession(journal, clock)
        self._thinker = thinker(policy.optimiser, budget_s=self._upkeep.optimiser_s)
        self._lead_error = ""
        self._degraded = ""
        self._advised = False
        self._begun = False
        self.upgrades = Upgrades(
            self,
            registry,
            profiles=lambda: self._in_force.profiles,
            leading=lambda: leadership.leading,
            clock=clock,
        )

    # ------------------------------------------------------------------ loop

    async def begin(self) -> None:
        """Take over what the journal holds: the newest policy, and how long starts took.

        The given policy is stored as version 1 where there is none yet.
        """
        await self._in_force.begin()
        wall_s, now_s = self._clock.wall_s(), self._clock.monotonic_s()
        ready = await self._journal.outcomes(self._policy.model, "ready", limit=128)
        self._book.recall((o.document, now_s - max(0.0, wall_s - o.at_s)) for o in reversed(ready))
        shown = await self._journal.newest(
            self._policy.model, limit=DECISIONS_SHOWN, changes_only=True
        )
        self._recent.extend(row_of(record) for record in shown)
        await self._judge.begin(self._journal, self._policy.model)
        self._begun = True

    async def adopt(self, policy: Policy) -> None:
        """Make a policy given at start the next version, unless it is the one in force.

        What people asked for stays: only they let go (see `kept`).
        """
        await self._in_force.adopt(policy)

    async def run(self) -> None:
        """Tick for ever. A tick that fails is logged and counted, and the next one comes in time."""
        if not self._begun:
            await self.begin()
        while True:
            started_s = self._clock.monotonic_s()
            try:
                await self.tick()
            except ReadyplaneError as error:
                # A store that is away for a while must not end the loop; targets stay as they are.
                self._degraded = str(error)
                log.error("tick failed: %s", error)
            took_s = self._clock.monotonic_s() - started_s
            await self._pause(max(0.01, self._policy.tick_s - took_s))

    async def tick(self) -> Decision:
        """One round: look, decide, journal, act, show."""
        started_s = self._clock.monotonic_s()
        leading = await self._lead()
        look = await self._look()
        leading = leading and not look.deposed
        await self._resolve()
        self._serve_again()
        await self._in_force.follow(started_s)
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        held = None
        if look.instances is not None:
            held = allocations(look.instances, awaited=self._awaited())
        plan = self._plan(leading=leading)
        await self._places.look(plan, now_s=now_s)
        if plan.compiled != self._places.compiled:
            plan = replace(plan, compiled=self._places.compiled)
        done = self._hand.collect()
        if self._metrics is not None:
            for call in done:
                self._metrics.call(self._policy.model, call.kind)
        observation = observe(
            model=plan.model,
            previous=self._previous,
            current=self._current,
            allocations=held,
            refused=refusals(done),
            nodes=self._places.nodes,
            t_ready=t_ready(self._book, plan, prior=self._policy.t_ready, now_s=now_s),
            priors=self._policy.priors,
            now_s=now_s,
            outside=look.outside,
        )
        decision_id = f"d{round(wall_s)}-{self._make_id()}"
        before = self._memory
        inputs = Inputs(observation, plan, before, now_s, decision_id)
        decision, memory, inputs = await think(inputs, self._brain, self._thinker)
        self._memory = memory
        self._inputs = inputs
        self._follower.calls(done, wall_s=wall_s)
        if leading:
            await self._record_and_act(decision, inputs, wall_s=wall_s)
        workers = () if look.router is None else look.router.workers
        self._follower.look(
            workers,
            look.instances or (),
            fleet_known=look.router is not None,
            now_s=now_s,
            wall_s=wall_s,
        )
        if leading:
            # A planner that stands by keeps what it saw: whoever led may have missed it.
            await self._tell(wall_s=wall_s)
            await self._tidy(now_s, wall_s)
            self._stood.look(workers, plan, now_s=now_s)
        self._seconds.take(look.instances)
        seen = self._seen(plan, observation, decision, wall_s)
        self._show(seen, leading=leading)
        if self._metrics is not None:
            took_s = self._clock.monotonic_s() - started_s
            self._metrics.tick(seen, state_pools(seen), memory, leading=leading, took_s=took_s)
            self._metrics.stood(plan, self._stood.seconds)
        return decision

    async def aclose(self) -> None:
        """Stop acting and let another planner take over."""
        await self._hand.aclose()
        try:
            await self._leadership.resign()
        except ReadyplaneError as error:
            log.warning("leadership runs out by itself: %s", error)

    async def _look(self) -> Look:
        look = await self._sources.look(leader_epoch=self._leadership.epoch)
        if look.deposed:
            # Paused beyond its lease, or the lease store lost it: somebody obeys a newer number.
            self._leadership.depose()
        router, still = look.router, ""
        if router is not None and self._current is not None:
            still = stands_still(self._current, router)
            router = None if still else router
        # Without a new answer both are the same one: no rate can be made of it twice.
        self._previous, self._current = self._current, router or self._current
        self._degraded = look.router_error or still or look.actuator_error or self._lead_error
        degraded = self._degraded or self._hand.advice
        self._degraded = "; ".join(filter(None, (degraded, self._in_force.error)))
        return look

    def _awaited(self) -> set[str]:
        """Workers of whose end a decision has to learn: ordered, or still known to the router.

        The actuator tells of hundreds more, which ended long ago.
        """
        known = self._current.workers if self._current is not None else ()
        mine = {o.worker_id for o in self._memory.orders}
        mine.update(*(o.known or () for o in (self._memory.owned_p, self._memory.owned_d)))
        return mine.union(w.worker_id for w in known)

    async def _lead(self) -> bool:
        before, self._lead_error = self._leadership.epoch, ""
        try:
            leading = await self._leadership.renew(
                partial(self._journal.next_epoch, self._policy.model)
            )
            if leading and self._leadership.epoch != before:
                await self._succession.begin(self._leadership.epoch, self._policy.model)
                self._memory = self._succession.adopted(self._memory)
            return leading
        except ReadyplaneError as error:
            self._lead_error = f"leadership: {error}"
            self._leadership.lose()
            return self._leadership.leading

    async def _resolve(self) -> None:
        """Which artifact new workers serve. Kept when the registry is away: content cannot change."""
        reference = self._policy.reference
        if reference.startswith("sha256:"):
            self._digest, self._resolve_error = reference, ""
            return
        now_s = self._clock.monotonic_s()
        due = self._resolved_s is None or now_s - self._resolved_s >= self._upkeep.resolve_every_s
        if self._registry is None or not due:
            return
        try:
            async with asyncio.timeout(LOOK_S_MAX):
                manifest = await self._registry.resolve(reference)
        except (ReadyplaneError, OSError, TimeoutError) as error:
            self._resolve_error = f"artifact {reference}: {str(error) or type(error).__name__}"
            self._degraded = self._degraded or self._resolve_error
            return
        self._resolved_s = now_s
        if manifest.canary is None and self._digest != manifest.digest:
            # Every start of it would be refused: what serves stays what is ordered.
            self._resolve_error = f"artifact {reference}: {UNANSWERED}"
            self._degraded = self._degraded or self._resolve_error
            if self._digest:
                return
        else:
            self._resolve_error = ""
        self._digest = manifest.digest
        self._in_force.resolved()

    def _plan(self, *, leading: bool) -> Plan:
        key = (self._in_force.version, self._digest, leading)
        if self._plans is None or self._plans[0] != key:
            plan = make_plan(
                self._policy,
                version=self._in_force.version,
                manifest_digest=self._digest,
                profiles=self._in_force.profiles,
            )
            # A planner that does not lead watches: it holds everything, and acts on nothing.
            self._plans = key, plan if leading else replace(plan, paused=True)
        return self._plans[1]

    async def _record_and_act(self, decision: Decision, inputs: Inputs, *, wall_s: float) -> None:
        """Journal first, then act: nothing is done that nobody could explain afterwards."""
        due = self._kept_s is None or inputs.now_s - self._kept_s >= self._upkeep.sample_every_s
        if decision.changed or due:
            record = record_of(
                decision,
                inputs,
                at_s=wall_s,
                leader_epoch=self._leadership.epoch,
                totals=totals_of(self._current),
            )
            try:
                await self._journal.append(record, leader_epoch=self._leadership.epoch)
            except StaleEpoch as error:
                # Whoever leads by now has read all that it takes over: this never was decided.
                log.warning("decision %s is not carried out: %s", decision.decision_id, error)
                self._leadership.depose()
                return
            except ReadyplaneError as error:
                # Serving comes before book-keeping: act, and say that the record is lost.
                log.error("decision %s is not journalled: %s", decision.decision_id, error)
                self._degraded = self._degraded or f"journal: {error}"
            self._kept_s = inputs.now_s
            self._judge.expect(record)
            if decision.changed:
                self._recent.appendleft(row_of(record))
                log.info(record.summary, extra={"scale_decision_id": decision.decision_id})
                export_decision(
                    decision.decision_id,
                    model=record.model,
                    summary=record.summary,
                    orders=len(decision.orders),
                    drains=len(decision.drains),
                )
        if not self._leadership.leading:
            return
        self._succession.carry_on(self._hand, self._memory)
        self._hand.take(decision, leader_epoch=self._leadership.epoch)
        self._hand.ration(decision, leader_epoch=self._leadership.epoch)
        self._follower.expects(decision, wall_s=wall_s)
        self._hand.tell_again(
            decision,
            inputs.observation,
            self._memory,
            () if self._current is None else self._current.workers,
            deadline_s=self._policy.drain_deadline_s,
            leader_epoch=self._leadership.epoch,
        )

    async def _tell(self, *, wall_s: float) -> None:
        """What became of orders and drains, and of one decision whether it was worth it."""
        judged = await self._judge.look(self._journal, wall_s=wall_s)
        if judged is not None:
            self._follower.keep([judged])
        outcomes = self._follower.collect()
        if not outcomes:
            return
        try:
            await self._journal.attach(outcomes)
        except ReadyplaneError:
            self._follower.keep(outcomes)  # told again at the next tick: the first one stays
            raise

    async def _tidy(self, now_s: float, wall_s: float) -> None:
        if self._pruned_s is not None and now_s - self._pruned_s < self._upkeep.prune_every_s:
            return
        self._pruned_s = now_s
        await self._journal.prune(
            self._policy.model,
            keep=self._upkeep.keep_decisions,
            older_than_s=wall_s - self._upkeep.keep_s,
        )

    # ------------------------------------------------------------------ state

    def _seen(
        self, plan: Plan, observation: Observation, decision: Decision, wall_s: float
    ) -> Seen:
        return Seen(
            plan=plan,
            observation=observation,
            decision=decision,
            sample=self._current,
            worker_seconds=self._seconds.by_role(),
            wall_s=wall_s,
            paused=self._policy.paused,
            degraded=self._degraded or self._resolve_error,
            silent=self._heard.of(self._current, observation.allocations),
            denied=self._memory.denied,
            advisory=bool(self._hand.advice),
        )

    def _show(self, seen: Seen, *, leading: bool) -> None:
        """Keep what a person may ask for; the whole document is made only when somebody looks."""
        if not leading:
            seen = replace(seen, degraded=seen.degraded or self._leadership.standing_by())
        self._last = seen
        self._history.add(seen)
        if not self._watchers:
            return
        state = self._document(seen)
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()  # a slow watcher skips to the newest
            queue.put_nowait(state)

    def _document(self, seen: Seen) -> dict[str, Any]:
        state = state_document(seen, state_pools(seen), self._recent)
        warnings = self._in_force.warnings
        return {**state, "policy_warnings": warnings, "leader": self._leadership.document()}

    async def state(self, model: str = "") -> dict[str, Any]:
        """See the port. Raises NotFound for another model, Unavailable before the first tick."""
        self._in_force.check(model)
        if self._last is None:
            raise Unavailable("the planner has not looked yet", "ask again in a moment")
        return {**self._document(self._last), "history": self._history.document()}

    async def watch_state(self, model: str = "") -> AsyncIterator[dict[str, Any]]:
        """See the port; a watcher that falls behind gets the newest state."""
        self._in_force.check(model)
        if len(self._watchers) >= WATCHERS_MAX:
            raise Unavailable(f"{WATCHERS_MAX} watchers are connected", "close one of them")
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=1)
        self._watchers.add(queue)
        try:
            if self._last is not None:
                yield self._document(self._last)
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    # ------------------------------------------------------------------ decisions

    async def list_decisions(
        self, *, model: str = "", limit: int = 50, changes_only: bool = False, before: int = 0
    ) -> list[dict[str, Any]]:
        """See the port. `before`: a `sequence` to go on from; `undone` is what came to nothing."""
        self._in_force.check(model)
        records = await self._journal.newest(
            self._policy.model, limit=max(1, limit), changes_only=changes_only, before=before
        )
        told = await self._journal.outcomes_of([r.decision_id for r in records], ASKED)
        found = undone(told)
        return [
            {**r.document, "sequence": r.sequence, "undone": found.get(r.decision_id, [])}
            for r in records
        ]

    async def explain(self, decision_id: str) -> dict[str, Any]:
        """See the port."""
        record, outcomes = await self._journal.get(checked_id(decision_id))
        rows = [] if self._last is None else self._document(self._last)["workers"]
        return explanation(record, outcomes, {row["worker_id"]: row for row in rows})

    async def replay(self, decision_id: str) -> dict[str, Any]:
        """See the port."""
        record, _outcomes = await self._journal.get(checked_id(decision_id))
        return recall(record)

    async def what_if(self, changes: Mapping[str, str], *, model: str = "") -> dict[str, Any]:
        """See the port. Asked of the inputs of the last tick; raises Unavailable before the first."""
        self._in_force.check(model)
        if self._inputs is None:
            raise Unavailable("the planner has not looked yet", "ask again in a moment")
        budget_s = self._upkeep.optimiser_s
        return await ask(self._inputs, changes, policy=self._policy, budget_s=budget_s)

    # ------------------------------------------------------------------ policy

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        """See the port."""
        self._in_force.check(model)
        return self._policy.document(), self._in_force.version

    async def set_policy(
        self,
        policy: Mapping[str, Any],
        *,
        model: str = "",
        merge: bool = False,
        expected_version: int = 0,
    ) -> tuple[dict[str, Any], int]:
        """See the port. In force from the next tick, which comes at once."""
        return await self._in_force.set(
            policy, model=model, merge=merge, expected_version=expected_version
        )

    async def set_paused(self, paused: bool, *, model: str = "", reason: str = "") -> bool:
        """See the port. Kept in the policy, so that a restart does not let go by itself."""
        self._in_force.check(model)
        if self._policy.paused is not paused:
            await self.set_policy({"paused": paused}, merge=True)
            log.info("paused" if paused else "let go", extra={"why": reason})
        return paused

    def tell_policy_error(self, text: str) -> None:
        """What is wrong with a policy file that somebody watches; shown until it is right."""
        self._in_force.error = text

    @property
    def _policy(self) -> Policy:
        return self._in_force.policy

    def _serve_again(self) -> None:
        """What was only advised to drain still serves, and is wanted until it is decided anew."""
        if self._advised and not self._policy.advisory:
            self._memory = replace(self._memory, draining=())
        self._advised = self._policy.advisory

    def _rollout(self) -> Told | None:
        if self._last is None or not self._leadership.leading:
            return None
        return self._last.decision.rollout

    def _obey(self, before: Policy, policy: Policy) -> None:
        """Another version has come into force."""
        if policy.optimiser != before.optimiser or self._thinker is None:
            self._thinker = thinker(policy.optimiser, budget_s=self._upkeep.optimiser_s)
        asked = policy.rollout.asked != before.rollout.asked
        if asked or policy.reference != before.reference:
            self._resolved_s = None
        self._hand.advise(policy.advisory)
        self._kick.set()

    async def _pause(self, seconds: float) -> None:
        """Until the next tick is due, or something asks for one now."""
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        kicked = asyncio.ensure_future(self._kick.wait())
        try:
            await asyncio.wait({sleeping, kicked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sleeping, kicked):
                task.cancel()
            self._kick.clear()
