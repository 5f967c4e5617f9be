"""The policy that `up` and `replay` begin with, checked before anything is started.

Owns that policy and which profile it means for a class of workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from readyplane.core.errors import NotFound, ReadyplaneError, Unavailable
from readyplane.ports import Order

LEARN_S = 2.0
"""So long the planner is waited for before an order goes by the classes that are known."""

log = logging.getLogger(__name__)


def demo_policy(over: Path | None, *, quick: bool = False) -> dict[str, Any]:
    """The demo's policy with the fields of a file laid over it.

    Raises:
        InvalidField: the file cannot be read, or a field is wrong. UnknownField: with its place.
    """
    from readyplane_lab.demo import DEMO_POLICY, QUICK_POLICY
    from readyplane_lab.up.options import read_policy
    from readyplane_planner.policy import overlay
    from readyplane_planner.policy import read_policy as check

    wanted = dict(DEMO_POLICY)
    if quick:
        wanted = overlay(wanted, QUICK_POLICY)
    if over is not None:
        wanted = overlay(wanted, read_policy(over))
    check(wanted)
    return wanted


class ClassProfiles:
    """The profile of a class: the policy's, which may be a file, else the one of that name.

    What a policy said stays known when the next one says nothing of that class: an order that was
    decided before may still come.

    Attributes:
        version: the newest version of a policy that was taken; 0 for none.
        asking: reads the policy for all that wait for it.
    """

    def __init__(self) -> None:
        from readyplane import profiles

        self.version = 0
        self.asking: asyncio.Future[str] | None = None
        self._found = {name: name for name in profiles.names()}
        self._named: set[str] = set()

    def know(self, worker_class: str) -> bool:
        """Whether a class has a profile."""
        return worker_class in self._found

    def cover(self, order: Order) -> bool:
        """Whether the order's class is known as of the policy that it was decided under."""
        return self.know(order.worker_class) and self.version >= order.policy_version

    def take(self, policy: Mapping[str, Any], version: int = 0) -> None:
        """Learn the classes of a policy document; relative files are of this process's folder."""
        self.version = max(self.version, version)
        pools = [p for p in (policy.get("decode"), policy.get("prefill")) if isinstance(p, Mapping)]
        for one in [c for p in pools for c in (*(p.get("classes") or ()), p)]:
            profile = str(one.get("profile") or one.get("worker_class"))
            is_file = profile.endswith(".json") or "/" in profile
            name = str(one.get("worker_class"))
            self._found[name] = str(Path(profile).absolute() if is_file else profile)
            self._named.add(name)

    def __call__(self, worker_class: str) -> str:
        """Name or path of the profile.

        Raises:
            NotFound: no policy has named that class, and no profile is called so.
        """
        if not self.know(worker_class):
            known = ", ".join(sorted(self._named)) or "none"
            remedy = (
                f"name it in the policy with its profile (worker_class, profile); it has {known}"
            )
            raise NotFound("worker class", worker_class, remedy)
        return self._found[worker_class]


def profiles_of(policy: Mapping[str, Any]) -> ClassProfiles:
    """The profiles of the classes of one policy."""
    found = ClassProfiles()
    found.take(policy)
    return found


class Policies(Protocol):
    """Who knows the policy in force: a planner."""

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        """Policy and version."""
        ...


async def learn(profiles: ClassProfiles, planner: Policies, order: Order) -> None:
    """Take the classes of the policy in force, where an order goes by what is not known of it.

    Orders that come together ask once. What was known stays while the planner cannot be asked.

    Raises:
        Unavailable: nobody tells the policy, and the class of the order is not known without it.
    """
    why = ""
    for _ in range(2):  # an answer that others waited for already may be of before this order
        if profiles.cover(order):
            return
        if profiles.asking is None or profiles.asking.done():
            profiles.asking = asyncio.ensure_future(_read(profiles, planner))
        why = await asyncio.shield(profiles.asking)
        if why:
            break
    if why and not profiles.know(order.worker_class):
        what = f"worker class {order.worker_class} is not known, nor the policy: {why}"
        raise Unavailable(what, "order it again when the planner answers")


async def _read(profiles: ClassProfiles, planner: Policies) -> str:
    """Why the policy in force cannot be read; empty when it was."""
    try:
        document, version = await asyncio.wait_for(planner.get_policy(), LEARN_S)
    except (ReadyplaneError, TimeoutError) as error:
        why = str(error) or f"no answer within {LEARN_S:g} s"
        log.warning("the policy in force cannot be read, its former classes count: %s", why)
        return why
    profiles.take(document, version)
    return ""


def ranks_of(profile_of: Callable[[str], str]) -> Callable[[str], int]:
    """How many ranks a worker of a class has: one for each of its GPUs.

    What is returned raises NotFound for a class without a profile.
    """
    from readyplane import profiles

    return lambda name: profiles.load(profile_of(name), worker_class=name).gpus
