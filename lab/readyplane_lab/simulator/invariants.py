"""What must hold at every step of every run; a run in which it does not is over.

Owns the checks and their wording. Those of one event are made at that event (a pair, a lease, an
order, a decision, a record); those of a whole state in sweeps, seldom enough to cost little. They
look at the production objects themselves, because a check that asks a twin proves the twin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from readyplane.core.worker import Lease, WorkerState
from readyplane.ports import Pair
from readyplane_lab.simulator.engine import SimEngine
from readyplane_lab.simulator.gateway import Record
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.decide import POOLS, Decision, Plan
from readyplane_router.desk import Desk
from readyplane_router.members import Member

CLOSE = 1e-6
# One that is told to drain while a pair is on its way to the gateway still serves it.
SERVES = (WorkerState.READY, WorkerState.DRAINING)


class Broken(AssertionError):
    """An invariant does not hold: what, and the facts."""


def _hold(holds: bool, what: str, **facts: object) -> None:
    if not holds:
        said = ", ".join(f"{name}={value!r}" for name, value in facts.items())
        raise Broken(f"{what}: {said}")


class Epochs:
    """Numbers that may never go back, by name."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._seen: dict[str, int] = {}

    def take(self, name: str, epoch: int) -> None:
        """One more."""
        before = self._seen.get(name, 0)
        _hold(epoch >= before, f"the {self._what} went back", of=name, before=before, now=epoch)
        self._seen[name] = epoch

    def lease(self, lease: Lease) -> None:
        """A lease that was granted."""
        self.take(lease.worker_id, lease.epoch)


def pair_is_ready(pair: Pair, members: Mapping[str, Member]) -> None:
    """A request goes only to workers that the router knows as ready, under their present epoch."""
    for stage, end in (("prefill", pair.prefill), ("decode", pair.decode)):
        member = members.get(end.worker_id)
        state = None if member is None else member.state
        epoch = None if member is None else member.epoch
        if state not in SERVES or epoch != end.epoch:
            _hold(
                False,
                f"a request was sent to a {stage} worker that is not ready",
                reservation=pair.reservation_id,
                worker=end.worker_id,
                state=state,
                epoch=epoch,
                promised=end.epoch,
            )


def seats_are_booked_once(desk: Desk) -> None:
    """What each seat holds is what the reservations say, and fits the seat.

    An answer that outgrows its reservation is booked for more than was free: such seats may be full
    beyond their blocks, and their engine preempts.
    """
    sequences: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    outgrown: set[str] = set()
    for held in desk.held.values():
        if held.emitted > 1:
            outgrown.add(held.decode.key)
        sequences[held.decode.key] += 1
        blocks[held.decode.key] += held.decode_blocks
        if not held.local:
            sequences[held.prefill.key] += held.prefilling
            blocks[held.prefill.key] += held.prefill_blocks if held.reading else 0
    for key, seat in desk.seats.items():
        if (seat.sequences, seat.kv_blocks) != (sequences[key], blocks[key]):
            _hold(
                False,
                "a seat holds something else than was promised",
                seat=key,
                sequences=(seat.sequences, sequences[key]),
                kv_blocks=(seat.kv_blocks, blocks[key]),
            )
        full = seat.kv_blocks > seat.kv_total_blocks and key not in outgrown
        if full or seat.sequences > seat.max_num_seqs:
            _hold(
                False,
                "a seat is promised twice",
                seat=key,
                kv_blocks=(seat.kv_blocks, seat.kv_total_blocks),
                sequences=(seat.sequences, seat.max_num_seqs),
            )


def engine_is_sound(worker_id: str, engine: SimEngine) -> None:
    """Blocks and sequences of an engine fit it; one without work holds nothing and lost nothing."""
    if engine.dead:
        return
    model, pool, stats = engine.model, engine.model.pool, engine.model.stats()
    fits = pool.private >= 0 and pool.used + pool.idle <= pool.total
    if not (fits and stats.running <= model.max_num_seqs):
        _hold(
            False,
            "an engine holds more than it has",
            worker=worker_id,
            private=pool.private,
            used=pool.used,
            idle=pool.idle,
            total=pool.total,
            running=(stats.running, model.max_num_seqs),
        )
    if not model.is_idle():
        return
    _hold(pool.used == 0, "an idle engine holds KV blocks", worker=worker_id, used=pool.used)
    tokens_are_conserved(worker_id, engine)


def tokens_are_conserved(worker_id: str, engine: SimEngine) -> None:
    """Of an engine without work: every token was told of, and every prompt computed or cached."""
    stats, tally = engine.model.stats(), engine.tally
    if stats.generated_tokens_total != tally.output:
        _hold(
            False,
            "output tokens are not conserved",
            worker=worker_id,
            generated=stats.generated_tokens_total,
            told=tally.output,
        )
    if stats.preemptions_total or stats.aborted_total:
        return  # what was computed twice, or for nobody, is no part of any prompt
    if stats.computed_tokens_total + tally.cached != tally.prompt:
        _hold(
            False,
            "prompt tokens are not conserved",
            worker=worker_id,
            computed=stats.computed_tokens_total,
            cached=tally.cached,
            prompts=tally.prompt,
        )


def targets_are_in_bounds(decision: Decision, plan: Plan) -> None:
    """Targets lie within the policy's bounds, orders within bounds and budget."""
    if plan.paused:
        return
    held = ordered = 0
    for name in POOLS:
        pool, limits = decision.pool(name), plan.pool(name).limits
        mine = [order for order in decision.orders if order.pool == name]
        orders = sum(not order.standby for order in mine)
        most = max(limits.high, pool.counts.live)
        beside = most + plan.rollout.surge
        if not limits.low <= pool.target <= most or pool.counts.live + orders > beside:
            _hold(
                False,
                "a target is out of bounds",
                pool=name,
                target=pool.target,
                bounds=(limits.low, limits.high),
                live=pool.counts.live,
                orders=orders,
                decision=decision.decision_id,
            )
        told = sum(activation.pool == name for activation in decision.activations)
        standby = pool.counts.standby + len(mine) - orders - told
        if standby > max(plan.pool(name).standby, pool.counts.standby):
            _hold(False, "more stand by than the policy wants", pool=name, standby=standby)
        held += pool.counts.held * limits.gpus
        ordered += len(mine) * limits.gpus
    budget = plan.budget_gpus
    if budget is not None and ordered and held + ordered > budget:
        _hold(False, "orders exceed the budget", held=held, ordered=ordered, budget=budget)


def bill_adds_up(
    booked: float, held: Iterable[tuple[int, float, float]], window: tuple[float, float]
) -> None:
    """What was booked by part is what the workers were held for.

    Args:
        held: (GPUs, allocated, released) of each allocation.
    """
    first_s, last_s = window
    billed = sum(
        gpus * max(0.0, min(to_s, last_s) - max(from_s, first_s)) for gpus, from_s, to_s in held
    )
    close = abs(booked - billed) <= CLOSE * max(1.0, billed)
    _hold(close, "billed seconds do not add up", booked=booked, billed=billed)


def each_request_ended_once(records: Sequence[Record], requests: Sequence[WorkloadRequest]) -> None:
    """One record a request, and a finished one has all its tokens."""
    asked = {r.index: r for r in requests}
    ends = Counter(r.index for r in records)
    wrong = {index for index in asked.keys() | ends.keys() if ends[index] != 1}
    _hold(not wrong, "requests have not exactly one end", indexes=sorted(wrong)[:10])
    cut = [r.index for r in records if r.outcome == "finished" and r.osl != asked[r.index].osl]
    _hold(not cut, "finished requests lack tokens", indexes=cut[:10])
