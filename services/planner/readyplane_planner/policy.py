"""The policy: what is wanted of a model's pools. Hot, versioned, recorded in each decision.

Owns the schema, the checks across fields, and the step from a policy to the plan that the brains
follow. A misspelled or misplaced field is refused with the place where it belongs; an impossible
combination is refused with what to write instead (B167, B168). Seconds, tokens and workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from readyplane.core.errors import InvalidField
from readyplane.core.identity import digest_of
from readyplane.core.profile import ClassProfile
from readyplane.core.profile_default import UNKNOWN_CLASS
from readyplane.core.startup import StartQuantiles
from readyplane.profiles import load as load_profile
from readyplane_planner.capacity import Combine
from readyplane_planner.class_policy import (
    ClassPolicy,
    NodePolicy,
    check_classes,
    class_plans,
    node_plans,
)
from readyplane_planner.decide import Plan, PoolPlan
from readyplane_planner.degradation_policy import DegradationPolicy
from readyplane_planner.forecast import Knobs
from readyplane_planner.guard import Limits
from readyplane_planner.optimisers import load_optimiser
from readyplane_planner.policy_checks import unreachable
from readyplane_planner.policy_words import named
from readyplane_planner.rollout import Asked, Rules
from readyplane_planner.season_policy import SeasonPolicy
from readyplane_planner.signals import Priors

WINDOW_S_DEFAULT = 10.0
WORKERS_MAX = 1024
RISK_SHARE = 0.8
"""Of what may be missed, the part that is planned for: the rest is for what no plan knows."""

Seconds = Annotated[float, Field(ge=0.0, le=86_400.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, le=86_400.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SloPolicy(_Strict):
    """Latency targets, and the promise: `attainment` of all requests shall meet both.

    The planner keeps as much as that needs and no more: it plans for somewhat fewer misses than may
    be, and what was missed moves that. `quantile` is the one of the predicted TTFT.
    """

    ttft_s: Positive = 2.0
    tpot_s: Positive = 0.1
    quantile: float = Field(default=0.9, ge=0.5, le=0.999)
    attainment: float = Field(default=0.99, ge=0.5, le=0.9999)


class PoolPolicy(_Strict):
    """One pool: bounds in workers, the class that is started, and its profile (name or file).

    `spare`: workers kept beyond the need, for those that may be lost. `standby`: workers kept loaded
    and proved beside the pool, which serve within a second when it grows; they are paid for and are
    not among `max`. `standby_holds`: what they hold until then. `classes`: where there are
    several; the pool is sized in workers of `worker_class`, which is one of them, the first by default.
    """

    min: int = Field(default=1, ge=0, le=WORKERS_MAX)
    max: int = Field(default=8, ge=0, le=WORKERS_MAX)
    spare: int = Field(default=0, ge=0, le=WORKERS_MAX)
    fallback: int = Field(default=0, ge=0, le=WORKERS_MAX)
    standby: int = Field(default=0, ge=0, le=WORKERS_MAX)
    standby_holds: Literal["weights", "process", "asleep"] = "weights"
    worker_class: str = Field(default="h200", min_length=1)
    profile: str = Field(default="h200-llama8b-fp8", min_length=1)
    classes: list[ClassPolicy] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _reference(cls, given: Any) -> Any:
        """The reference class and its profile follow from the classes where they are left out."""
        classes = given.get("classes") if isinstance(given, Mapping) else None
        if not isinstance(classes, list) or not all(isinstance(c, Mapping) for c in classes):
            return given
        filled = dict(given)
        if classes:
            filled.setdefault("worker_class", classes[0].get("worker_class", ""))
        for offered in classes:
            if offered.get("worker_class") == filled.get("worker_class"):
                filled.setdefault("profile", offered.get("profile", ""))
        return filled


class DecodePolicy(PoolPolicy):
    """The decode pool; `convertible`: its new workers also take prompts, in short chunks.

    They are lent to a prefill pool that is slower still; nobody counts on them for it.
    """

    convertible: bool = True


class ForecastPolicy(_Strict):
    """How demand is forecast; see `readyplane_planner.forecast.Knobs`.

    `window_s` null means: 10 s, or the shorter of the cooldowns, so that no look-back outlives a
    cooldown.
    """

    window_s: Positive | None = None
    warmup_s: Seconds = 600.0
    prior_margin: Share = 0.3
    aci_step: float = Field(default=0.02, ge=0.0, le=0.1)
    season: SeasonPolicy = SeasonPolicy()


class LoadPolicy(_Strict):
    """How predicted and actual latency make a load (R3.1).

    The actual one is the P90 of the router's window. It is known while it rests on `samples_min`
    requests, and the window is no longer than `window_s`: a load must not tell of what has passed.
    """

    combine: Literal["max", "weighted", "predicted"] = "max"
    actual_weight: float = Field(default=0.5, ge=0.0, le=1.0)
    samples_min: int = Field(default=10, ge=1)
    window_s: Positive = 20.0


class UpPolicy(_Strict):
    """Growing: pause between steps, workers a step, workers on their way at once.

    `hold_s`: demand that fits without the headroom must have lasted that long.
    """

    cooldown_s: Seconds = 5.0
    max_step: int = Field(default=2, ge=1, le=WORKERS_MAX)
    pending_max: int = Field(default=4, ge=1, le=WORKERS_MAX)
    hold_s: Seconds = 5.0


class DownPolicy(_Strict):
    """Shrinking: `hold_s` null means T_ready plus the time of a drain, as measured (ski rental).

    `window_s`: the largest want of that window counts. `band`: share of demand that must fit on
    top before anything shrinks.
    """

    cooldown_s: Seconds = 15.0
    max_step: int = Field(default=1, ge=1, le=WORKERS_MAX)
    window_s: Positive = 15.0
    hold_s: Seconds | None = None
    band: Share = 0.05


class PriorPolicy(_Strict):
    """T_ready quantiles that stand in until starts were measured, in seconds."""

    p50_s: Positive = 30.0
    p90_s: Positive = 60.0
    p99_s: Positive = 120.0


class LengthPolicy(_Strict):
    """Mean lengths in tokens that stand in until requests were seen."""

    isl: float = Field(default=1000.0, ge=1.0, le=1e7)
    osl: float = Field(default=256.0, ge=1.0, le=1e6)


class AskedPolicy(_Strict):
    """The last wish of a person about a roll-out; `readyplane rollout` writes it."""

    id: str = Field(min_length=1, max_length=64)
    action: Literal["go", "pause", "resume", "undo"]
    by: str = Field(default="", max_length=200)
    at_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)


class RolloutPolicy(_Strict):
    """How one generation takes the place of another.

    Attributes:
        surge: workers of each pool that start beside those it shall have. pause_on: what a person
            decides about (attainment: it does worse; starts: they fail; unknown: no evidence and no
            progress for `patience_s`); what is not named is rolled back at once.
        rollback_below: it does worse when its share of attained requests is surely below that part
            of what the old one attains. samples_min: requests that make a share, 0 asks for none.
        verify_s: the new generation serves alone that long before it is done.
        starts_failed_max: starts that fail in a row. asked: what a person wants, once.
    """

    surge: int = Field(default=1, ge=1, le=8)
    pause_on: tuple[Literal["attainment", "starts", "unknown"], ...] = Field(
        default=("unknown",), strict=False
    )
    rollback_below: float = Field(default=0.9, ge=0.0, le=1.0)
    verify_s: Seconds = 60.0
    samples_min: int = Field(default=20, ge=0, le=100_000)
    starts_failed_max: int = Field(default=3, ge=1, le=100)
    patience_s: Positive = 600.0
    asked: AskedPolicy | None = None


class Policy(_Strict):
    """Everything a person may want of one model's fleet.

    Attributes:
        manifest: tag, digest or model name of the artifact that new workers serve; empty is the
            model's name. catch_up_s: a backlog is cleared within that time once capacity is there.
        handover_s: what every request pays between P and D. min_ready_s: a worker serves that long
            before it may be drained. flip: where one pool shrinks while the other
            grows, workers change the stage, if their engine can, instead of ending and starting. warm_worker_s: its speed is not learned from before that.
        eta_bound_factor: a start is given up after so many P99 of T_ready. orphan_s: an allocation
            without a lease is given back after that. backoff_s: first pause after a failed start.
        start_mode: `auto` takes, for each start, what costs least over its expected life.
        graph_stages: workers are ready with few graphs and capture the others while they serve.
            nodes: where workers may start, for a preference among them.
        budget_gpus: of both pools together, null for none.
    """

    model: str = Field(min_length=1)
    manifest: str = Field(default="", max_length=512)
    slo: SloPolicy = SloPolicy()
    prefill: PoolPolicy = PoolPolicy()
    decode: DecodePolicy = DecodePolicy()
    tick_s: float = Field(default=2.0, ge=0.05, le=300.0)
    forecast_quantile: float = Field(default=0.9, ge=0.5, le=0.999)
    headroom: Share = 0.0
    forecast: ForecastPolicy = ForecastPolicy()
    load: LoadPolicy = LoadPolicy()
    up: UpPolicy = UpPolicy()
    down: DownPolicy = DownPolicy()
    catch_up_s: Positive = 10.0
    handover_s: Seconds = 0.05
    min_ready_s: Seconds = 10.0
    flip: bool = False
    warm_worker_s: Seconds = 60.0
    eta_bound_factor: float = Field(default=3.0, ge=1.0, le=100.0)
    orphan_s: Seconds = 15.0
    backoff_s: Positive = 5.0
    t_ready_prior: PriorPolicy = PriorPolicy()
    prior_lengths: LengthPolicy = LengthPolicy()
    drain_deadline_s: Positive = 300.0
    budget_gpus: int | None = Field(default=None, ge=1)
    start_mode: Literal["auto", "eager", "jit", "aot"] = "jit"
    graph_stages: bool = False
    nodes: list[NodePolicy] = Field(default_factory=list)
    rollout: RolloutPolicy = RolloutPolicy()
    degradation: DegradationPolicy = DegradationPolicy()
    fallback_after: int = Field(default=10, ge=1, le=10_000)
    hand_hold_s: Seconds = 0.0
    optimiser: str = Field(default="size", min_length=1, max_length=64)
    advisory: bool = False
    paused: bool = False

    @property
    def reference(self) -> str:
        """What the registry is asked for."""
        return self.manifest or self.model

    @property
    def window_s(self) -> float:
        """Look-back of a rate: as given, else no longer than a cooldown and no shorter than a tick."""
        if self.forecast.window_s is not None:
            return self.forecast.window_s
        return max(self.tick_s, min(WINDOW_S_DEFAULT, self.down.cooldown_s))

    @property
    def priors(self) -> Priors:
        """What the signals lean on."""
        return Priors(
            isl=self.prior_lengths.isl,
            osl=self.prior_lengths.osl,
            stale_after_s=3.0 * self.tick_s + 1.0,
            warm_s=self.window_s,
        )

    @property
    def t_ready(self) -> StartQuantiles:
        """The prior of T_ready."""
        prior = self.t_ready_prior
        return StartQuantiles(prior.p50_s, prior.p90_s, prior.p99_s, 0, 0.0)

    def document(self) -> dict[str, Any]:
        """The whole policy as a JSON object, defaults written out."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """Identity of the content."""
        return digest_of(self.document())


def read_policy(document: Mapping[str, Any]) -> Policy:
    """A checked policy from a JSON object.

    Raises:
        UnknownField: a field that does not exist, with the place where it belongs.
        InvalidField: a wrong value or combination, with what to write instead.
    """
    if not isinstance(document, Mapping):
        raise InvalidField("policy", document, "write an object of policy fields")
    try:
        policy = Policy.model_validate(dict(document))
    except ValidationError as error:
        raise named(error, Policy, root="policy") from error
    _cross_check(policy)
    return policy


def merged(policy: Policy, changes: Mapping[str, Any]) -> Policy:
    """The policy with the given fields changed; objects are merged field by field."""
    if not isinstance(changes, Mapping):
        raise InvalidField("policy", changes, "write an object of policy fields")
    return read_policy(overlay(policy.document(), changes))


def make_plan(
    policy: Policy,
    *,
    version: int,
    manifest_digest: str,
    profiles: tuple[ClassProfile, ClassProfile] | None = None,
) -> Plan:
    """The policy in the words of the brains, its profiles (P, D) loaded unless given."""
    both = profiles or pool_profiles(policy)
    return Plan(
        model=policy.model,
        version=version,
        prefill=_pool(policy, policy.prefill, both[0]),
        decode=_pool(
            policy, policy.decode, both[1], tpot_s=policy.slo.tpot_s * policy.decode.convertible
        ),
        ttft_s=policy.slo.ttft_s,
        tpot_s=policy.slo.tpot_s,
        slo_quantile=policy.slo.quantile,
        risk=RISK_SHARE * (1.0 - policy.slo.attainment),
        tick_s=policy.tick_s,
        headroom=policy.headroom,
        band=policy.down.band,
        catch_up_s=policy.catch_up_s,
        overhead_s=policy.handover_s,
        knobs=Knobs(
            quantile=policy.forecast_quantile,
            window_s=policy.window_s,
            warmup_s=policy.forecast.warmup_s,
            prior_margin=policy.forecast.prior_margin,
            aci_step=policy.forecast.aci_step,
        ),
        combine=Combine(policy.load.combine),
        combine_weight=policy.load.actual_weight,
        actual_count_min=policy.load.samples_min,
        actual_window_s=policy.load.window_s,
        min_ready_s=policy.min_ready_s,
        flip=policy.flip,
        warm_worker_s=policy.warm_worker_s,
        eta_bound_factor=policy.eta_bound_factor,
        orphan_s=policy.orphan_s,
        order_grace_s=max(10.0, 3.0 * policy.tick_s),
        drain_deadline_s=policy.drain_deadline_s,
        budget_gpus=policy.budget_gpus,
        start_mode=policy.start_mode,
        graph_stages=policy.graph_stages,
        nodes=node_plans(policy.nodes),
        rollout=_rollout(policy.rollout),
        season=policy.forecast.season.rules,
        degradation=policy.degradation.rules(tick_s=policy.tick_s),
        manifest_digest=manifest_digest,
        paused=policy.paused,
        fallback_after=policy.fallback_after,
        hand_hold_s=policy.hand_hold_s,
        digest=policy.digest,
    )


def policy_warnings(
    policy: Policy, profiles: tuple[ClassProfile, ClassProfile]
) -> list[dict[str, Any]]:
    """What the policy asks for and cannot get, as JSON objects: `field`, `value`, `best`, `code`."""
    plan = make_plan(policy, version=0, manifest_digest="", profiles=profiles)
    lengths = policy.prior_lengths
    return [asdict(found) for found in unreachable(plan, isl=lengths.isl, osl=lengths.osl)]


def pool_profiles(policy: Policy) -> tuple[ClassProfile, ClassProfile]:
    """The profiles of both pools. Raises NotFound or InvalidField naming the field."""
    both = (policy.prefill, policy.decode)
    p, d = (load_profile(pool.profile, worker_class=pool.worker_class) for pool in both)
    return p, d


def _pool(
    policy: Policy, pool: PoolPolicy, profile: ClassProfile, *, tpot_s: float = 0.0
) -> PoolPlan:
    limits = Limits(
        low=pool.min,
        high=pool.max,
        step_up=policy.up.max_step,
        step_down=policy.down.max_step,
        up_cooldown_s=policy.up.cooldown_s,
        up_hold_s=policy.up.hold_s,
        down_cooldown_s=policy.down.cooldown_s,
        window_s=policy.down.window_s,
        hold_s=policy.down.hold_s,
        pending_max=policy.up.pending_max,
        # One GPU is an assumption of a profile that nobody measured, and no basis for a budget.
        gpus=0 if policy.budget_gpus is not None and _assumed(profile) else profile.gpus,
        backoff_s=policy.backoff_s,
    )
    # Where the mode is to be chosen, or the class, each worker counts for what it is.
    usual = profile.eager if policy.start_mode == "eager" and not pool.classes else profile
    return PoolPlan(
        limits,
        pool.worker_class,
        usual,
        convertible_tpot_s=tpot_s,
        classes=class_plans(pool.classes, most=pool.max),
        spare=pool.spare,
        fallback=pool.fallback,
        standby=pool.standby,
        standby_holds=pool.standby_holds,
    )


def _assumed(profile: ClassProfile) -> bool:
    return not profile.measured and profile.name.startswith(UNKNOWN_CLASS)


def _rollout(policy: RolloutPolicy) -> Rules:
    asked = policy.asked
    return Rules(
        surge=policy.surge,
        pause_on=tuple(policy.pause_on),
        rollback_below=policy.rollback_below,
        verify_s=policy.verify_s,
        samples_min=policy.samples_min,
        starts_failed_max=policy.starts_failed_max,
        patience_s=policy.patience_s,
        asked=None if asked is None else Asked(asked.id, asked.action, asked.by, asked.at_s),
    )


def as_stored(document: Mapping[str, Any]) -> dict[str, Any]:
    """A stored policy with each field where it stands today: `surge` was at the top once."""
    moved = dict(document)
    if "surge" in moved:
        moved["rollout"] = {"surge": moved.pop("surge"), **(moved.get("rollout") or {})}
    return moved


def kept(given: Policy, stored: Policy) -> Policy:
    """A policy that a file gives, with what people asked for meanwhile: a pause, and a roll-out.

    A file that names no artifact leaves it to whoever rolls one out.
    """
    rules = given.rollout.model_copy(update={"asked": stored.rollout.asked})
    update: dict[str, Any] = {"paused": stored.paused, "rollout": rules}
    if "manifest" not in given.model_fields_set:
        update["manifest"] = stored.manifest
    return given.model_copy(update=update)


def _cross_check(policy: Policy) -> None:
    for name in ("prefill", "decode"):
        pool: PoolPolicy = getattr(policy, name)
        if pool.min > pool.max:
            remedy = f"use at most policy.{name}.max, which is {pool.max}"
            raise InvalidField(f"policy.{name}.min", pool.min, remedy)
        if pool.fallback > pool.max:
            remedy = f"use at most policy.{name}.max, which is {pool.max}"
            raise InvalidField(f"policy.{name}.fallback", pool.fallback, remedy)
        if pool.spare >= max(1, pool.max):
            remedy = f"leave room for the load below policy.{name}.max, which is {pool.max}"
            raise InvalidField(f"policy.{name}.spare", pool.spare, remedy)
        check_classes(
            name,
            pool.classes,
            reference=pool.worker_class,
            low=pool.min,
            high=pool.max,
            ttft_s=policy.slo.ttft_s - policy.handover_s,
            tpot_s=policy.slo.tpot_s,
            isl=policy.prior_lengths.isl,
            osl=policy.prior_lengths.osl,
        )
    prior = policy.t_ready_prior
    if not prior.p50_s <= prior.p90_s <= prior.p99_s:
        shown = f"{prior.p50_s}, {prior.p90_s}, {prior.p99_s}"
        raise InvalidField("policy.t_ready_prior", shown, "let p50_s <= p90_s <= p99_s")
    window_s = policy.window_s
    if policy.down.cooldown_s < window_s:
        # Shorter, and one step of load changes the direction twice until its average settles (B32).
        remedy = f"use at least the look-back of the rates, policy.forecast.window_s = {window_s}"
        raise InvalidField("policy.down.cooldown_s", policy.down.cooldown_s, remedy)
    if window_s < policy.tick_s:
        remedy = f"use at least policy.tick_s, which is {policy.tick_s}"
        raise InvalidField("policy.forecast.window_s", window_s, remedy)
    _staged(policy)
    load_optimiser(policy.optimiser)
    profiles = pool_profiles(policy)
    for name, profile in zip(("prefill", "decode"), profiles, strict=True):
        pool = getattr(policy, name)
        if profile.worker_class != pool.worker_class:
            remedy = f"the profile {pool.profile} describes class {profile.worker_class}"
            raise InvalidField(f"policy.{name}.worker_class", pool.worker_class, remedy)
    _holds_one(policy, profiles)
    if policy.budget_gpus is not None:
        least = sum(
            getattr(policy, name).min * profile.gpus
            for name, profile in zip(("prefill", "decode"), profiles, strict=True)
        )
        if least > policy.budget_gpus:
            remedy = f"the minimum of both pools needs {least} GPUs"
            raise InvalidField("policy.budget_gpus", policy.budget_gpus, remedy)


def _staged(policy: Policy) -> None:
    if policy.graph_stages and policy.start_mode == "eager":
        remedy = "leave it out, or take jit, aot or auto: an eager engine never has graphs"
        raise InvalidField("policy.graph_stages", policy.graph_stages, remedy)


def _holds_one(policy: Policy, profiles: tuple[ClassProfile, ClassProfile]) -> None:
    lengths = policy.prior_lengths
    for name, profile in zip(("prefill", "decode"), profiles, strict=True):
        held = lengths.isl + (lengths.osl if name == "decode" else 0.0)
        if held > profile.kv_capacity_tokens:
            remedy = (
                f"a request of policy.prior_lengths holds {held:.0f} KV tokens and a worker of the "
                f"profile {profile.kv_capacity_tokens}: give a class that holds one"
            )
            raise InvalidField(f"policy.{name}.profile", profile.name, remedy)


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A policy document with changes laid over it, objects field by field."""
    out = dict(base)
    for name, value in changes.items():
        below = out.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            out[name] = overlay(below, value)
        else:
            out[name] = value
    return out
