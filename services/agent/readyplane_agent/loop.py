"""The lease of a worker, kept: renewals up, directives down, and what a lost contact means.

Owns the session with the router. A renewal carries progress, load and KV events; a directive is
handed to `life`, whether an answer brings it or the router says it at once. A router that cannot be
reached never ends a worker: it serves on and asks again. A lease that is lost is asked for once more
under the same incarnation; the router alone decides, and whom it refuses is fenced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from readyplane.core.errors import (
    LostLease,
    NotFound,
    ReadyplaneError,
    StaleEpoch,
    Unavailable,
)
from readyplane.core.worker import Holds, Lease, LoadReport, StartProgress, WorkerOffer
from readyplane.kit.clock import Clock
from readyplane.ports import Directive, Renewal, RenewalAnswer, Router
from readyplane_agent.kv_events import KvForwarder

log = logging.getLogger("agent.session")

KV_GATHER_S = 0.2
BACKOFF_S = 0.2
BACKOFF_MAX_S = 5.0
JITTER = 0.1
QUIET = 0.25
"""Share of the ttl for which an answer is new enough: most that renewals cost is answering them."""


@dataclass(frozen=True, slots=True)
class News:
    """What the next renewal says besides KV events."""

    progress: StartProgress | None = None
    load: LoadReport | None = None
    drained: bool = False
    within_s: float | None = None
    stands_by: Holds | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    why: str
    between: Callable[[], None]
    done: asyncio.Future[Lease]


class Session:
    """The session of one incarnation.

    Args:
        router, clock: as they say. offer: made anew for each registration, since it says how long
            ago the order was. news: what to tell now. on_directive: called for each directive.
        on_regranted: the lease was granted anew; the gate must be passed again. random: 0 to 1.
    """

    def __init__(
        self,
        router: Router,
        *,
        clock: Clock,
        offer: Callable[[], WorkerOffer],
        news: Callable[[], Awaitable[News]],
        kv: KvForwarder,
        on_directive: Callable[[Directive], None],
        on_regranted: Callable[[Lease], None],
        random: Callable[[], float],
    ) -> None:
        self._router, self._clock, self._offer = router, clock, offer
        self._news, self._kv, self._random = news, kv, random
        self._on_directive, self._on_regranted = on_directive, on_regranted
        self._poke = asyncio.Event()
        self._changing: _Change | None = None
        self.lease: Lease | None = None
        self.contact_s: float | None = None
        self.failures = 0
        self.regranted = 0

    @property
    def epoch(self) -> int:
        """Epoch of the lease, 0 before there is one."""
        return 0 if self.lease is None else self.lease.epoch

    def poke(self) -> None:
        """Renew now rather than at the next turn."""
        self._poke.set()

    async def register(self, *, limit_s: float) -> Lease:
        """Get the lease, asking again while the router cannot be reached.

        Raises:
            ReadyplaneError: the router refuses, for good; or it is away still after `limit_s`.
        """
        until_s = self._clock.monotonic_s() + limit_s
        attempt = 0
        while True:
            try:
                self.lease = await self._router.register(self._offer())
            except (Unavailable, TimeoutError, OSError) as error:
                wait_s = self._backoff_s(attempt)
                if self._clock.monotonic_s() + wait_s > until_s:
                    raise
                log.warning("no lease yet: %s; asking again in %.1f s", error, wait_s)
                attempt += 1
                await self._clock.sleep(wait_s)
            else:
                self._granted(self.lease)
                return self.lease

    async def keep(self) -> None:
        """Renew until cancelled.

        Raises:
            LostLease, StaleEpoch: fenced: another incarnation has the name now.
        """
        wait_s = 0.0
        while True:
            await self._wait(wait_s)
            wait_s = await (self.renew() if self._changing is None else self._change())

    async def change(self, why: str, between: Callable[[], None]) -> Lease:
        """Give this lease up and take another, with the offer as it is once `between` was called.

        Done between two renewals, and asked again until the router answers.

        Raises:
            LostLease, StaleEpoch: fenced, or the lease was lost before: then it is not changed.
        """
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._changing = _Change(why, between, future)
        self.poke()
        return await future

    async def _change(self) -> float:
        assert self.lease is not None
        assert self._changing is not None
        old, change = self.lease, self._changing
        try:
            await self._router.leave(old.worker_id, old.incarnation, old.epoch, reason=change.why)
            change.between()
            self.lease = await self._router.register(self._offer())
        except (LostLease, StaleEpoch) as error:
            self._give_up_change(error)
            raise
        except (ReadyplaneError, TimeoutError, OSError) as error:
            self.failures += 1
            log.warning("no other lease yet: %s", str(error) or "no answer in time")
            return self._backoff_s(self.failures - 1)
        self.failures = 0
        self._changing = None
        self._granted(self.lease)
        self._kv.replay()
        if not change.done.done():
            change.done.set_result(self.lease)
        return 0.0

    def _give_up_change(self, error: ReadyplaneError) -> None:
        change, self._changing = self._changing, None
        if change is not None and not change.done.done():
            change.done.set_exception(error)

    async def renew(self) -> float:
        """One renewal; returns the seconds until the next. Raises like `keep`."""
        assert self.lease is not None
        news = await self._news()
        lease = self.lease
        renewal = Renewal(
            worker_id=lease.worker_id,
            incarnation=lease.incarnation,
            epoch=lease.epoch,
            progress=news.progress,
            load=news.load,
            kv_events=self._kv.take(),
            drained=news.drained,
            stands_by=news.stands_by,
            quiet=self._heard_lately(lease),
        )
        try:
            async with asyncio.timeout(lease.answer_within_s):
                answer = await self._router.renew(renewal)
        except StaleEpoch:
            raise
        except (LostLease, NotFound) as error:
            log.warning("%s; registering again", error)
            return await self._again(error)
        except (ReadyplaneError, TimeoutError, OSError) as error:
            # Whether the message arrived is not known: everything is told anew.
            self._kv.replay()
            self.failures += 1
            wait_s = min(self._backoff_s(self.failures - 1), lease.retry_within_s)
            why = str(error) or "no answer in time"
            log.warning("renewal failed (%s); serving on, asking again in %.1f s", why, wait_s)
            return wait_s
        self.failures = 0
        if answer.heard:  # a late one counts from when it was asked, and never takes contact back
            asked_s = self._clock.monotonic_s() - answer.age_s
            self.contact_s = asked_s if self.contact_s is None else max(self.contact_s, asked_s)
        self.lease = answer.lease
        self._obey(answer)
        turn_s = answer.lease.renew_every_s
        if news.within_s is not None:
            turn_s = min(turn_s, news.within_s)
        return turn_s * (1 - JITTER * self._random())

    def _granted(self, lease: Lease) -> None:
        self.lease = lease
        self.contact_s = self._clock.monotonic_s()
        self._router.hear(lease.worker_id, lease.incarnation, self._told)

    def _told(self, answer: RenewalAnswer) -> None:
        """A word between two renewals; one for another lease comes with an answer, if it holds."""
        if self._changing is None and answer.lease.epoch == self.epoch:
            self._obey(answer)

    def _obey(self, answer: RenewalAnswer) -> None:
        for directive in answer.directives:
            if directive.kind == "replay_kv":
                self._kv.replay()
            else:
                self._on_directive(directive)

    def _heard_lately(self, lease: Lease) -> bool:
        """Whether the last answer is new enough to go on without another one."""
        silent_s = self._clock.monotonic_s() - (self.contact_s or 0.0)
        return self.contact_s is not None and silent_s < QUIET * lease.ttl_s

    async def _again(self, error: ReadyplaneError) -> float:
        """Ask for the lease anew; the router knows whether somebody else has it by now."""
        try:
            lease = await self._router.register(self._offer())
        except (LostLease, StaleEpoch) as failure:
            self._give_up_change(failure)
            raise
        except (ReadyplaneError, TimeoutError, OSError) as failure:
            self.failures += 1
            log.warning("after %s no lease yet: %s", error.reason, failure)
            return self._backoff_s(self.failures - 1)
        self._give_up_change(error)
        self.regranted += 1
        self.failures = 0
        self._granted(lease)
        self._kv.replay()
        self._on_regranted(lease)
        return 0.0

    async def _wait(self, seconds: float) -> None:
        """Until the next turn, a poke, or KV news (which are gathered for a moment)."""
        if self.failures:
            # While the router is away neither pokes nor events may turn the backoff into a storm.
            await self._clock.sleep(seconds)
            return
        waits = [
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(self._poke.wait()),
            asyncio.ensure_future(self._kv.pending.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[2].done() and not (waits[0].done() or waits[1].done()):
                await self._clock.sleep(min(KV_GATHER_S, seconds))
        finally:
            for wait in waits:
                wait.cancel()
        self._poke.clear()

    def _backoff_s(self, attempt: int) -> float:
        full_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(attempt, 16))
        return full_s * (1 - JITTER * self._random())
