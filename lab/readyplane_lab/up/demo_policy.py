"""The policy that `up` and `replay` begin with, checked before anything is started.

Owns that policy and which profile it means for a class of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from readyplane.core.errors import NotFound


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


def profiles_of(policy: Mapping[str, Any]) -> Callable[[str], str]:
    """The profile of a class: the policy's, which may be a file, else the one of that name.

    What is returned raises NotFound for a class without one.
    """
    from readyplane import profiles

    found = {name: name for name in profiles.names()}
    pools = [p for p in (policy.get("decode"), policy.get("prefill")) if isinstance(p, Mapping)]
    for one in [c for p in pools for c in (*p.get("classes", ()), p)]:
        profile = str(one.get("profile") or one.get("worker_class"))
        is_file = profile.endswith(".json") or "/" in profile
        found[str(one.get("worker_class"))] = str(Path(profile).absolute() if is_file else profile)

    def profile_of(worker_class: str) -> str:
        if worker_class not in found:
            raise NotFound("worker class", worker_class, "use one of " + ", ".join(found))
        return found[worker_class]

    return profile_of


def ranks_of(profile_of: Callable[[str], str]) -> Callable[[str], int]:
    """How many ranks a worker of a class has: one for each of its GPUs.

    What is returned raises NotFound for a class without a profile.
    """
    from readyplane import profiles

    return lambda name: profiles.load(profile_of(name), worker_class=name).gpus
