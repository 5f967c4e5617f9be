"""One rank of a modelled group, from its memory to the canary (R17.1).

Owns the steps that a rank passes, each told as it is passed, and the process of the ranks that serve
nobody. Rank 0 is the engine's own process (`__main__`), which passes the same steps. A rank that
loses another one ends: a communicator cannot be mended, only made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from readyplane.core.errors import InvalidField, ReadyplaneError, Unsupported
from readyplane.core.startup import SegmentName
from readyplane.kit.clock import Clock
from readyplane_agent.engines.modelled import group_weights
from readyplane_agent.engines.modelled.communicator import Communicator, RankLost
from readyplane_agent.engines.modelled.settings import ModelledSettings
from readyplane_agent.engines.modelled.startup import StartupLog, wait_for
from readyplane_agent.engines.ranks import LOST_STATUS

LOG = logging.getLogger("engine")
T = TypeVar("T")
FAILED_STATUS = 3


class GroupWeights:
    """What all ranks hold together, seen from this one; stands for `startup.Weights` at rank 0.

    Attributes:
        link: the communicator, which lives as long as the group. fingerprint: of the whole weights,
            the same as of one rank. tensor_count: of the artifact. size_bytes: of this rank's memory.
    """

    def __init__(self, s: ModelledSettings, *, clock: Clock, told: Callable[[str], None]) -> None:
        """From the mapped memory to the canary. Blocking: it waits for all other ranks.

        Args:
            told: a step was passed.

        Raises:
            IdentityMismatch, InvalidField: what the ranks hold is not one model, each naming it.
            NotFound, Unavailable: memory or another rank is not there.
        """
        if s.rendezvous is None:
            raise InvalidField("--rendezvous", "", "give the file where rank 0 is to be found")
        own = group_weights.map_own(s)
        digests = own.whole_digests()
        self.tensor_count, self.size_bytes = len(own.table.names), own.size_bytes
        told("verified")
        if s.rank == 0:
            self.link = Communicator.lead(s.world, s.rendezvous)
        else:
            self.link = Communicator.follow(s.rank, s.world, s.rendezvous, clock=clock)
        try:
            self.link.all_reduce([1])
            told("connected")
            tables = group_weights.agree(self.link, own.table, s.manifest_digest)
            told("placed")
            self.fingerprint = group_weights.together(self.link, own, tables, digests)
            group_weights.answer_alike(self.link, own.table, self.fingerprint)
            told("canary_passed")
        except BaseException:
            self.link.close()
            raise


async def lead(
    s: ModelledSettings, clock: Clock, log: StartupLog, group: asyncio.Future[Communicator]
) -> GroupWeights:
    """Rank 0's part, beside its loop; `group` gets the communicator for `lost` to watch."""
    told = teller(s, log)
    weights = await _beside(lambda: GroupWeights(s, clock=clock, told=told))
    group.set_result(weights.link)
    return weights


def never_again() -> NoReturn:
    """Weights that a group gave up are not read again: its ranks would have to come together anew."""
    raise Unsupported("reading the weights of a group again", "start it anew")


async def lost(group: asyncio.Future[Communicator]) -> None:
    """Raises Unavailable when a rank of the group is gone; an engine of one rank waits forever."""
    link = await group
    await _beside(link.watch)


async def _beside(work: Callable[[], T]) -> T:
    """In a thread that the end of this process does not wait for: another rank may keep it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: object) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            try:
                found = work()
            except ReadyplaneError as error:
                loop.call_soon_threadsafe(tell, done.set_exception, error)
            except Exception as error:  # whatever it is, whoever waits here is to see it
                LOG.exception("the group broke")
                loop.call_soon_threadsafe(tell, done.set_exception, error)
            else:
                loop.call_soon_threadsafe(tell, done.set_result, found)

    threading.Thread(target=run, name="group", daemon=True).start()
    return await done


def teller(s: ModelledSettings, log: StartupLog) -> Callable[[str], None]:
    """Writes each step to the start-up file; with `--hold` it stays at one, to rehearse that."""

    def told(step: str) -> None:
        LOG.info("rank %d of %d: %s", s.rank, s.world, step)
        log.write(step=step)
        if s.hold == (s.rank, step):
            LOG.warning("held at %s as asked (--hold)", step)
            threading.Event().wait()

    return told


def follow(s: ModelledSettings, clock: Clock, log: StartupLog) -> int:
    """Run a rank that serves nobody, until the group ends; returns the exit status.

    That is `FAILED_STATUS`, or `LOST_STATUS` when another rank is gone; the start-up file says why.
    """
    told = teller(s, log)
    told("scheduled")
    try:
        if s.wait_weights_s:
            asyncio.run(wait_for(s.tensor_table, limit_s=s.wait_weights_s, clock=clock))
        with log.segment(SegmentName.HOST_TO_DEVICE):
            weights = GroupWeights(s, clock=clock, told=told)
        LOG.info("%d bytes mapped", weights.size_bytes)
        log.write(state="ready", fingerprint=f"{weights.fingerprint:016x}")
        weights.link.stand()
    except ReadyplaneError as error:
        log.write(state="failed", failure=str(error), lost=getattr(error, "lost", None))
        LOG.error("rank %d of %d ends: %s", s.rank, s.world, error)
        return LOST_STATUS if isinstance(error, RankLost) else FAILED_STATUS
    return FAILED_STATUS
