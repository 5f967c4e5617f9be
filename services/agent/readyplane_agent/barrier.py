"""The group barrier as an agent sees it: which step each of its ranks has passed (R17.1).

Owns what the router is told of the ranks, and the wait until all of them have passed everything.
Judging is the router's (`readyplane_router.group`); a group that failed ends the start here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from readyplane.core.errors import Refused, Unavailable
from readyplane.core.worker import Lease
from readyplane.kit.clock import Clock
from readyplane.ports import GroupStatus, RankReport, Router
from readyplane_agent.patience import Patient

BARRIER_POLL_S = 0.5
FIRST, LAST = "scheduled", "canary_passed"


class Barrier:
    """Rank reports of one worker.

    Args:
        lease: as it stands now. digest: of the manifest that was verified. limit_s: of a start.

    Attributes:
        others: tells how far the other ranks are; None for a worker of one.
    """

    def __init__(
        self,
        *,
        router: Router,
        clock: Clock,
        patient: Patient,
        lease: Callable[[], Lease],
        digest: Callable[[], str],
        limit_s: float,
    ) -> None:
        self.others: Callable[[], Awaitable[None]] | None = None
        self._router, self._clock, self._patient = router, clock, patient
        self._lease, self._digest, self._limit_s = lease, digest, limit_s

    async def passed(
        self, step: str, *, rank: int = 0, progress: int = 0, detail: str = ""
    ) -> GroupStatus:
        """Tell that a rank has passed a step, or gets on with the next.

        Raises:
            Refused: the group has failed.
        """
        digest = self._digest() if step != FIRST else ""

        def tell() -> Awaitable[GroupStatus]:
            lease = self._lease()
            return self._router.report_rank(
                RankReport(
                    worker_id=lease.worker_id,
                    incarnation=lease.incarnation,
                    epoch=lease.epoch,
                    rank=rank,
                    step=step,
                    manifest_digest=digest,
                    detail=detail,
                    progress=progress,
                )
            )

        status = await self._patient(tell)
        if status.state == "failed":
            raise Refused("group", [f"failed at {step}", *status.waiting_for], "order it anew")
        return status

    async def fall(self) -> int:
        """Report rank 0's last step (which implies the others) until all ranks have done so.

        How long the others may take is the router's to judge, by their progress; a whole start
        takes `limit_s` at most. Returns the group's epoch.
        """
        until_s = self._clock.monotonic_s() + self._limit_s
        while True:
            if self.others is not None:
                await self.others()
            status = await self.passed(LAST)
            if status.state == "published":
                return status.group_epoch
            if self._clock.monotonic_s() > until_s:
                raise Unavailable(
                    f"the group did not form within {self._limit_s:.0f} s, waiting for "
                    + ", ".join(status.waiting_for),
                    "look at the ranks named, or raise --start-limit-s",
                )
            await self._clock.sleep(BARRIER_POLL_S)
