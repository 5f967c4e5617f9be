"""How others choose a pair, on the production router's desk: the same seats, store and engines.

Owns one rule each: random, round-robin, least-loaded, power-of-two, session affinity, and the
sequential KV-aware cost that Dynamo publishes. Each picks the prefill worker first and then the
decode worker, as all of them do. Hard constraints are the same for all (open, format, blocks,
sequences). A rule is played in two ways: `held` by the router's admission (a prefill worker with
enough work gets no more, and the request waits in the router, in its order), or at once, as the
peers do: the request goes into the engine's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from readyplane_lab.simulator.router import SimRouter
from readyplane_router.desk import Desk
from readyplane_router.pair import Ask, Chosen, Seat, Shed, Wait, decide, pair_terms, takes
from readyplane_router.policy import RouterPolicy
from readyplane_router.waiting import Waiting

Pick = Callable[[Waiting, Ask, Sequence[Seat], np.random.Generator, Mapping[str, str]], Seat]


@dataclass(frozen=True)
class Rule:
    """One way to choose a pair.

    Attributes:
        prefill, decode: which of the workers that may take it. held: with the router's admission.
        sessions: by request id, for affinity. seed: of its draws.
    """

    name: str
    prefill: Pick
    decode: Pick
    held: bool
    sessions: Mapping[str, str]
    seed: int


class RuledDesk(Desk):
    """A desk whose pairs are chosen by a rule."""

    def __init__(self, model: str, policy: RouterPolicy, rule: Rule) -> None:
        super().__init__(model, policy)
        self._rule = rule
        self._generator = np.random.Generator(np.random.Philox(key=rule.seed))

    def verdict(self, entry: Waiting, *, now_s: float) -> Chosen | Wait | Shed:
        """The rule's pair where there is one; else what the router says."""
        rule, pair = self._rule, self.policy.pair
        ask = self.ask(entry, now_s=now_s)
        prefills = [s for s in self.prefills if _holds(ask, s, ask.isl)]
        if rule.held:
            prefills = [s for s in prefills if s.remaining_s(now_s) <= pair.prefill_ahead_s]
            decodes = [s for s in self.decodes if takes(ask, s, pair)]
        else:
            decodes = [s for s in self.decodes if _holds(ask, s, ask.isl + ask.output_reserved)]
        if not prefills or not decodes:
            return decide(ask, self.prefills, self.decodes, pair, now_s=now_s)
        p = rule.prefill(entry, ask, prefills, self._generator, rule.sessions)
        d = rule.decode(entry, ask, decodes, self._generator, rule.sessions)
        return Chosen(
            prefill=p,
            decode=d,
            terms=pair_terms(ask, p, d, pair, now_s=now_s),
            prefill_cached=min(ask.cached_tokens.get(p.key, 0), ask.isl - 1),
            decode_cached=min(ask.cached_tokens.get(d.key, 0), ask.isl),
            prefill_blocks=-(-ask.isl // p.block_size),
            decode_blocks=-(-(ask.isl + ask.output_reserved) // d.block_size),
        )

    def _full_for_s(self, now_s: float) -> float | None:
        return super()._full_for_s(now_s) if self._rule.held else None


class RuledRouter(SimRouter):
    """The production router; with a rule, its desks choose by that."""

    def __init__(self, *, rule: Rule | None, **parts: Any) -> None:
        super().__init__(**parts)
        self._rule = rule

    def desk(self, model: str) -> Desk:
        """See the service."""
        if self._rule is not None and model not in self.desks:
            self.desks[model] = RuledDesk(model, self.policy, self._rule)
        return super().desk(model)


def rules(*, held: bool, sessions: Mapping[str, str], seed: int) -> tuple[Rule, ...]:
    """Every rival, in one of the two ways."""
    picks = (
        ("random", _random, _random),
        ("round-robin", _in_turn, _in_turn),
        ("least-loaded", _least_prefill, _least_decode),
        ("power-of-two", _of_two(_least_prefill), _of_two(_least_decode)),
        ("session-affinity", _of_session, _of_session),
        ("dynamo-kv", _dynamo_prefill, _dynamo_decode),
    )
    return tuple(Rule(n, p, d, held, sessions, seed) for n, p, d in picks)


def _holds(ask: Ask, seat: Seat, tokens: int) -> bool:
    return (
        not seat.shut
        and seat.worker_id not in ask.avoid
        and seat.occupied() < seat.sequences_cap
        and tokens <= seat.free_blocks() * seat.block_size
    )


def _random(
    _entry: Waiting,
    _ask: Ask,
    seats: Sequence[Seat],
    generator: np.random.Generator,
    _sessions: Mapping[str, str],
) -> Seat:
    return seats[int(generator.integers(len(seats)))]


def _in_turn(
    _entry: Waiting,
    _ask: Ask,
    seats: Sequence[Seat],
    _generator: np.random.Generator,
    _sessions: Mapping[str, str],
) -> Seat:
    return min(seats, key=lambda s: s.last_used)


def _least_prefill(
    _entry: Waiting,
    _ask: Ask,
    seats: Sequence[Seat],
    _generator: np.random.Generator,
    _sessions: Mapping[str, str],
) -> Seat:
    """The fewest prompt tokens promised and not yet computed."""
    return min(seats, key=lambda s: (s.prefill_tokens, s.last_used))


def _least_decode(
    _entry: Waiting,
    _ask: Ask,
    seats: Sequence[Seat],
    _generator: np.random.Generator,
    _sessions: Mapping[str, str],
) -> Seat:
    """The fewest sequences."""
    return min(seats, key=lambda s: (s.sequences, s.last_used))


def _two(seats: Sequence[Seat], generator: np.random.Generator) -> Sequence[Seat]:
    drawn = generator.choice(len(seats), size=min(2, len(seats)), replace=False)
    return [seats[int(place)] for place in drawn]


def _of_two(pick: Pick) -> Pick:
    """The same rule, among two that were drawn."""

    def picked(
        entry: Waiting,
        ask: Ask,
        seats: Sequence[Seat],
        generator: np.random.Generator,
        sessions: Mapping[str, str],
    ) -> Seat:
        return pick(entry, ask, _two(seats, generator), generator, sessions)

    return picked


def _of_session(
    entry: Waiting,
    _ask: Ask,
    seats: Sequence[Seat],
    _generator: np.random.Generator,
    sessions: Mapping[str, str],
) -> Seat:
    """Rendezvous hashing: who goes or is full takes only its own sessions with it."""
    session = sessions[entry.shape.request_id]
    return max(seats, key=lambda s: xxhash.xxh3_64_intdigest(f"{session}|{s.worker_id}".encode()))


def _drawn_least(
    costs: Sequence[float], seats: Sequence[Seat], generator: np.random.Generator
) -> Seat:
    least = min(costs)
    equal = [seat for seat, cost in zip(seats, costs, strict=True) if cost <= least]
    return equal[int(generator.integers(len(equal)))]


def _dynamo_prefill(
    _entry: Waiting,
    ask: Ask,
    seats: Sequence[Seat],
    generator: np.random.Generator,
    _sessions: Mapping[str, str],
) -> Seat:
    """Blocks of prompt not yet computed there, with this one's, less those it holds of it."""
    costs = [
        max(0.0, s.prefill_tokens + ask.isl - ask.cached_tokens.get(s.key, 0)) / s.block_size
        for s in seats
    ]
    return _drawn_least(costs, seats, generator)


def _dynamo_decode(
    _entry: Waiting,
    _ask: Ask,
    seats: Sequence[Seat],
    generator: np.random.Generator,
    _sessions: Mapping[str, str],
) -> Seat:
    """The fewest blocks of sequences; what it holds of the prompt earns nothing."""
    return _drawn_least([s.kv_tokens / s.block_size for s in seats], seats, generator)
