"""What a policy may say of worker classes and machines, and the checks that belong to it.

Owns the schema of one class and one node, and the step to what the brains follow. A class that could
never keep the targets, or hold one request, is refused with the figure that says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.profiles import load as load_profile
from readyplane_planner.decide import ClassPlan, NodePlan

WORKERS_MAX = 1024
CLASSES_MAX = 8
NODES_MAX = 64


class ClassPolicy(BaseModel):
    """One class that a pool may start.

    Attributes:
        profile: name or file; it has to describe the class. price: of one GPU for an hour, null for
            the profile's. min, max: workers of this class; `max` is its quota, null for no limit.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    worker_class: str = Field(min_length=1)
    profile: str = Field(min_length=1)
    price: float | None = Field(default=None, gt=0.0, le=1e6, allow_inf_nan=False)
    min: int = Field(default=0, ge=0, le=WORKERS_MAX)
    max: int | None = Field(default=None, ge=0, le=WORKERS_MAX)


class NodePolicy(BaseModel):
    """One machine where workers may start: its GPUs, and the classes it holds (empty: any)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(min_length=1)
    gpus: int = Field(default=1, ge=1, le=WORKERS_MAX)
    classes: list[str] = Field(default_factory=list)


def class_plans(classes: Sequence[ClassPolicy], *, most: int) -> tuple[ClassPlan, ...]:
    """In the words of the brains. Raises NotFound or InvalidField for a profile."""
    found = []
    for offered in classes:
        profile = load_profile(offered.profile, worker_class=offered.worker_class)
        price = profile.price_per_gpu_hour if offered.price is None else offered.price
        high = most if offered.max is None else min(most, offered.max)
        found.append(
            ClassPlan(offered.worker_class, profile, price * profile.gpus, offered.min, high)
        )
    return tuple(found)


def node_plans(nodes: Sequence[NodePolicy]) -> tuple[NodePlan, ...]:
    """In the words of the brains."""
    return tuple(NodePlan(n.name, n.gpus, tuple(n.classes)) for n in nodes)


def check_classes(
    name: str,
    classes: Sequence[ClassPolicy],
    *,
    reference: str,
    low: int,
    high: int,
    ttft_s: float,
    tpot_s: float,
    isl: float,
    osl: float,
) -> None:
    """Refuse classes of a pool that cannot work together or with the targets.

    Args:
        reference: the pool's `worker_class`. low, high: of the pool. ttft_s: without the hand-over.
        isl, osl: mean lengths that are expected.

    Raises:
        InvalidField: naming the entry, its value and what to write instead.
    """
    if not classes:
        return
    where = f"policy.{name}.classes"
    if len(classes) > CLASSES_MAX:
        raise InvalidField(where, len(classes), f"name at most {CLASSES_MAX} classes")
    names = [c.worker_class for c in classes]
    twice = {n for n in names if names.count(n) > 1}
    if twice:
        raise InvalidField(where, sorted(twice)[0], "name every class once")
    if reference not in names:
        remedy = f"name one of policy.{name}.classes ({', '.join(names)}), or leave it out"
        raise InvalidField(f"policy.{name}.worker_class", reference, remedy)
    for place, offered in enumerate(classes):
        if offered.max is not None and offered.min > offered.max:
            remedy = f"use at most its max, which is {offered.max}"
            raise InvalidField(f"{where}.{place}.min", offered.min, remedy)
        _check_profile(
            f"{where}.{place}", offered, name, ttft_s=ttft_s, tpot_s=tpot_s, isl=isl, osl=osl
        )
    least = sum(c.min for c in classes)
    if least > high:
        raise InvalidField(f"{where}.min", least, f"policy.{name}.max is {high}")
    quotas = [high if c.max is None else c.max for c in classes]
    if sum(quotas) < low:
        remedy = f"policy.{name}.min is {low}, and the quotas of its classes hold {sum(quotas)}"
        raise InvalidField(f"{where}.max", sum(quotas), remedy)


def _check_profile(
    where: str,
    offered: ClassPolicy,
    name: str,
    *,
    ttft_s: float,
    tpot_s: float,
    isl: float,
    osl: float,
) -> None:
    profile = load_profile(offered.profile, worker_class=offered.worker_class)
    if profile.worker_class != offered.worker_class:
        remedy = f"the profile {offered.profile} describes class {profile.worker_class}"
        raise InvalidField(f"{where}.worker_class", offered.worker_class, remedy)
    why = _why_not(profile, name, ttft_s=ttft_s, tpot_s=tpot_s, isl=isl, osl=osl)
    if why and profile.measured:  # what nobody measured refuses nobody
        raise InvalidField(where, offered.worker_class, why)


def _why_not(
    profile: ClassProfile, name: str, *, ttft_s: float, tpot_s: float, isl: float, osl: float
) -> str:
    """Why a worker of the class could never serve; empty when it can."""
    if profile.kv_capacity_tokens < isl + osl:
        return (
            f"one request of {isl + osl:.0f} tokens does not fit its {profile.kv_capacity_tokens} "
            "KV tokens: take the class out"
        )
    if name == "prefill":
        own_s = profile.prefill_s(isl)
        if own_s > ttft_s:
            return (
                f"a prompt of {isl:.0f} tokens takes it {own_s:.2f} s and {ttft_s:.2f} s are left "
                "for it: take the class out, or raise policy.slo.ttft_s"
            )
        return ""
    alone_s = profile.iteration_s(1.0, isl + osl / 2.0)
    if alone_s > tpot_s:
        return (
            f"a token takes it {1e3 * alone_s:.0f} ms with one sequence alone: take the class out, "
            "or raise policy.slo.tpot_s"
        )
    return ""
