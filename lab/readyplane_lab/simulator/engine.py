"""A modelled engine on virtual time: the same `StagedEngineModel` that the engine process runs.

Owns turning its events into awaitable legs and into KV events for the router. One timer is set at a
time, at the model's next event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from readyplane.core.kv import KvEvent
from readyplane.core.profile import ClassProfile
from readyplane.core.worker import LoadReport
from readyplane.kit.clock import Clock
from readyplane_agent.engines.modelled.core_events import (
    EngineRequest,
    Finished,
    KvCleared,
    KvExpired,
    KvRemoved,
    KvStored,
    KvWanted,
    PrefillDone,
    TokensEmitted,
)
from readyplane_agent.engines.modelled.core_stages import StagedEngineModel

KV_EVENTS_MAX = 65_536


class LegFailed(RuntimeError):
    """An engine could not do its part; `why` says what happened."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


@dataclass(slots=True)
class Leg:
    """One request on one engine, as its caller sees it. Times are virtual seconds."""

    request: EngineRequest
    finished: asyncio.Future[Finished]
    first_token: asyncio.Future[float]
    kv_wanted: asyncio.Future[KvWanted]
    cached_tokens: int | None = None


@dataclass(slots=True)
class Tally:
    """Tokens by what the engine's events said, so that its own counters can be checked.

    Attributes:
        prompt, cached: of prompts that were prefilled here. output: of everything that ended.
    """

    prompt: int = 0
    cached: int = 0
    output: int = 0


@dataclass(slots=True)
class _Told:
    """KV events since they were last fetched, bounded; beyond the bound the worker starts over."""

    events: list[KvEvent] = field(default_factory=list)
    blocks: int = 0


class SimEngine:
    """One engine of one worker.

    Args:
        graph_blocks: KV blocks that its graphs will take, of one that comes up without them and runs
            as an eager one until it has them; None for a whole start.
    """

    def __init__(
        self,
        profile: ClassProfile,
        *,
        block_size: int,
        clock: Clock,
        graph_blocks: int | None = None,
    ) -> None:
        self.model = StagedEngineModel(
            profile,
            block_size=block_size,
            kv_blocks=max(1, profile.kv_capacity_tokens // block_size) + (graph_blocks or 0),
            iteration_factor=1.0 if graph_blocks is None else profile.eager_factor,
        )
        self.profile = profile
        self.dead = ""
        self.tally = Tally()
        self.on_busy: Callable[[float, float], None] | None = None  # told of each span of work
        self._clock = clock
        self._legs: dict[str, Leg] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._told = _Told()
        self._on_idle: list[asyncio.Future[None]] = []
        self._busy_since_s: float | None = None
        self._stalled_s: float | None = None
        self._lag_s = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            KvStored: self._stored,
            KvRemoved: self._removed,
            KvCleared: self._cleared,
            TokensEmitted: self._emitted,
            KvWanted: self._wanted,
            PrefillDone: self._prefilled,
            Finished: self._ended,
            KvExpired: self._expired,
        }

    def submit(self, request: EngineRequest) -> Leg:
        """Queue a request.

        Raises:
            LegFailed: the engine is dead. InvalidField: the request cannot be held at all.
        """
        if self.dead:
            raise LegFailed(self.dead)
        loop = asyncio.get_running_loop()
        leg = Leg(request, loop.create_future(), loop.create_future(), loop.create_future())
        self._legs[request.request_id] = leg
        if self._busy_since_s is None:
            self._busy_since_s = self._clock.monotonic_s()
        self.model.submit(request, self._now_s())
        self._pump()
        return leg

    def abort(self, request_id: str) -> None:
        """Drop a request, running or held."""
        if not self.dead:
            self.model.abort(request_id, self._now_s())
            self._pump()

    def move_out(self, request_id: str) -> int | None:
        """Stop what decodes and hold its KV for who goes on; its output tokens, None if it does
        not decode here.
        """
        if self.dead:
            return None
        emitted = self.model.move_out(request_id, self._now_s())
        self._pump()
        return emitted

    def kv_pulled(self, request_id: str) -> bool:
        """The reader has taken a held KV; False when it is gone."""
        if self.dead:
            return False
        pulled = self.model.kv_pulled(request_id, self._now_s())
        self._pump()
        return pulled

    def kv_arrived(self, request_id: str) -> None:
        """The KV of a D leg is there."""
        if not self.dead:
            self.model.kv_arrived(request_id, self._now_s())
            self._pump()

    def withhold(self, blocks: int) -> bool:
        """Take free KV blocks for graphs; False where there are not so many now."""
        taken = not self.dead and self.model.withhold(blocks, self._now_s())
        if taken:
            self._pump()
        return taken

    def return_withheld(self) -> None:
        """What graphs took is KV again."""
        if not self.dead:
            self.model.return_withheld(self._now_s())
            self._pump()

    def run_at(self, factor: float) -> None:
        """From the next iteration on every time is the profile's times `factor`."""
        if not self.dead:
            self.model.run_at(factor, self._now_s())
            self._pump()

    def stall(self) -> None:
        """Nothing goes on in it until `resume`, though it still takes requests."""
        if self._stalled_s is None:
            self._pump()
            self._stalled_s = self._clock.monotonic_s()
            if self._timer is not None:
                self._timer.cancel()

    def resume(self) -> None:
        """It goes on where it stood still."""
        if self._stalled_s is not None:
            self._lag_s += self._clock.monotonic_s() - self._stalled_s
            self._stalled_s, self._timer, self._timer_at = None, None, float("inf")
            if not self.dead:
                self._pump()

    def kill(self, why: str) -> None:
        """The engine is gone: every open leg fails, nothing is answered any more."""
        self.dead = why
        if self._timer is not None:
            self._timer.cancel()
        for leg in list(self._legs.values()):
            _fail(why, leg.finished, leg.first_token, leg.kv_wanted)
        self._legs.clear()
        self._tell_idle()

    async def idle(self) -> None:
        """Return when no sequence runs or waits and no KV is held for a reader."""
        while not self.dead and not self.model.is_idle():
            future = asyncio.get_running_loop().create_future()
            self._on_idle.append(future)
            await future

    def load(self) -> LoadReport:
        """What the engine says about itself, now: time that passed quietly counts as well."""
        if not self.dead:
            self._pump()
        stats = self.model.stats()
        return LoadReport(
            running=stats.running + stats.loading,
            waiting=stats.waiting,
            waiting_prefill_tokens=stats.waiting_prefill_tokens,
            kv_used_blocks=stats.kv_used_blocks,
            kv_total_blocks=stats.kv_total_blocks,
            prefill_tokens_total=stats.computed_tokens_total,
            decode_tokens_total=stats.generated_tokens_total,
            cached_tokens_total=stats.cached_tokens_total,
            preemptions_total=stats.preemptions_total,
            iterations_total=stats.iterations_total,
        )

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """KV events since the last call, in order."""
        told, self._told = self._told, _Told()
        return tuple(told.events)

    def settle_busy(self) -> None:
        """Tell of the span of work that is under way, up to now."""
        if self._busy_since_s is not None and self.on_busy is not None:
            now_s = self._clock.monotonic_s()
            self.on_busy(self._busy_since_s, now_s)
            self._busy_since_s = now_s

    # ------------------------------------------------------------------ inside

    def _now_s(self) -> float:
        """The model's time: it stands still while the engine is stalled, and lags ever after."""
        now_s = self._clock.monotonic_s() if self._stalled_s is None else self._stalled_s
        return now_s - self._lag_s

    def _pump(self, due_s: float | None = None) -> None:
        """Handle what is due and set the timer to what comes next.

        `due_s`: a timer that is over; the loop may stand a rounding error before it.
        """
        now_s = self._now_s()
        if due_s is not None and due_s > now_s:
            now_s = due_s
        model = self.model
        while True:
            for event in model.advance(now_s):
                told = self._handlers.get(type(event))
                if told is not None:
                    told(event)
            due_s = model.next_event_s()
            if due_s is None or due_s > now_s:
                break
        if due_s is None:
            self._tell_idle()
        elif due_s < self._timer_at or self._timer is None:
            self._set_timer(due_s)

    def _set_timer(self, due_s: float) -> None:
        if self._stalled_s is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due_s
        self._timer = asyncio.get_running_loop().call_at(due_s + self._lag_s, self._due)

    def _due(self) -> None:
        due_s, self._timer, self._timer_at = self._timer_at, None, float("inf")
        self._pump(due_s)

    def _stored(self, event: KvStored) -> None:
        self._note(KvEvent("stored", event.block_hashes))

    def _removed(self, event: KvRemoved) -> None:
        self._note(KvEvent("removed", event.block_hashes))

    def _cleared(self, event: KvCleared) -> None:
        del event
        self._note(KvEvent("cleared"))

    def _emitted(self, event: TokensEmitted) -> None:
        leg = self._legs.get(event.request_id)
        if leg is not None and not leg.first_token.done():
            leg.first_token.set_result(event.at_s + self._lag_s)

    def _wanted(self, event: KvWanted) -> None:
        leg = self._legs.get(event.request_id)
        if leg is not None and not leg.kv_wanted.done():
            leg.kv_wanted.set_result(event)

    def _prefilled(self, event: PrefillDone) -> None:
        leg = self._legs.get(event.request_id)
        if leg is not None:
            leg.cached_tokens = event.cached_tokens
            self.tally.prompt += leg.request.prompt_tokens
            self.tally.cached += event.cached_tokens

    def _expired(self, event: KvExpired) -> None:
        del event
        self._tell_idle()

    def _ended(self, event: Finished) -> None:
        self.tally.output += event.output_tokens
        if self._lag_s:
            event = replace(event, at_s=event.at_s + self._lag_s)
        leg = self._legs.pop(event.request_id, None)
        if leg is not None:
            if not leg.finished.done():
                leg.finished.set_result(event)
            if event.reason in ("abort", "error"):
                _fail(event.reason, leg.first_token, leg.kv_wanted)
        self._tell_idle()

    def _note(self, event: KvEvent) -> None:
        self._told.events.append(event)
        self._told.blocks += len(event.block_hashes)
        if self._told.blocks > KV_EVENTS_MAX:
            self._told = _Told([KvEvent("cleared")])

    def _tell_idle(self) -> None:
        if self._busy_since_s is not None and (self.dead or self.model.is_idle()):
            if self.on_busy is not None:
                self.on_busy(self._busy_since_s, self._clock.monotonic_s())
            self._busy_since_s = None
        if self._on_idle and (self.dead or self.model.is_idle()):
            waiting, self._on_idle = self._on_idle, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


def _fail(why: str, *futures: asyncio.Future[Any]) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(LegFailed(why))
            future.exception()  # looked at: nobody may be waiting for it
