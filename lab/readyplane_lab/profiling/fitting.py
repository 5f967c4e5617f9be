"""From readings to a class profile with its fit errors, and what speaks against using it (pure).

Errors are of held-out points: each inner prompt length is predicted from the others, each decode
load by a fit without it. A profile that cannot predict its own measurements plans wrongly, quietly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.core.profile_fit import StageFit
from readyplane_lab.profiling.readings import Readings, decode_points, prefill_points

PREFILL_POINTS_MIN = 4
DECODE_POINTS_MIN = 5
ERROR_MAX = 0.25
"""Median relative error from which on a stage is not described by what was measured."""
GROWTH_MIN = 1.1
"""A prompt four times as long takes at least that much longer, or it was not computed."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What nobody can measure from outside, and whose profile it is."""

    name: str
    source: str
    worker_class: str
    gpus: int
    price_per_gpu_hour: float
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    max_batch_tokens: int
    max_num_seqs: int


def profile_of(readings: Readings, naming: Naming) -> ClassProfile:
    """The profile of these readings.

    Raises:
        InvalidField: fewer points than any profile needs.
    """
    prefill, decode = prefill_points(readings.prefill), decode_points(readings.decode)
    for name, points, least in (("prefill", prefill, 2), ("decode", decode, 2)):
        if len(points) < least:
            raise InvalidField(
                f"{name} points", len(points), f"measure at least {least}: more time, or more files"
            )
    profile = ClassProfile(
        name=naming.name,
        source=naming.source,
        worker_class=naming.worker_class,
        gpus=naming.gpus,
        price_per_gpu_hour=naming.price_per_gpu_hour,
        prefill_points=tuple((n, round(ms, 4)) for n, ms in prefill),
        decode_points=tuple((n, round(kv, 1), round(ms, 4)) for n, kv, ms in decode),
        kv_capacity_tokens=naming.kv_capacity_tokens,
        kv_bytes_per_token=naming.kv_bytes_per_token,
        max_batch_tokens=naming.max_batch_tokens,
        max_num_seqs=naming.max_num_seqs,
    )
    return replace(profile, fit=fit_of(profile, readings))


def fit_of(profile: ClassProfile, readings: Readings | None = None) -> tuple[StageFit, ...]:
    """Errors of both stages, and of cached prompts where some were measured."""
    stages = [
        _stage("prefill", _prefill_errors(profile), len(profile.prefill_points)),
        _stage("decode", _decode_errors(profile), len(profile.decode_points)),
    ]
    known = [r for r in (readings.repeats if readings is not None else ()) if r.cached]
    cached = [
        abs(profile.prefill_s(r.tokens - r.cached, r.cached) * 1e3 / r.milliseconds - 1.0)
        for r in known
    ]
    stages.append(_stage("cached", cached, len(known)))
    return tuple(s for s in stages if s.held_out)


def objections(profile: ClassProfile) -> tuple[str, ...]:
    """What speaks against planning with it; empty when nothing does."""
    said = []
    prefill, decode = profile.prefill_points, profile.decode_points
    if len(prefill) < PREFILL_POINTS_MIN:
        said.append(f"{len(prefill)} prompt lengths, at least {PREFILL_POINTS_MIN} are needed")
    if len(decode) < DECODE_POINTS_MIN:
        said.append(f"{len(decode)} decode loads, at least {DECODE_POINTS_MIN} are needed")
    if len({p[0] for p in decode}) < 2:
        said.append("one number of sequences only: how iterations grow with them is not known")
    if len({round(p[1] / p[0], -2) for p in decode}) < 2:
        said.append("one context only: what KV tokens cost is not known")
    (low, low_ms), (high, high_ms) = prefill[0], prefill[-1]
    if high >= 4 * low and high_ms < GROWTH_MIN * low_ms:
        said.append(
            f"{high:,.0f} prompt tokens take no longer than {low:,.0f}: they came from a cache, or "
            f"something else dominates the time"
        )
    _, per_sequence, per_token = profile.decode_coefficients_s()
    if per_sequence + per_token <= 0:
        said.append("iterations do not grow with load: measure more sequences")
    for fit in profile.fit:
        if fit.stage != "cached" and fit.error > ERROR_MAX:
            said.append(
                f"{fit.stage} is predicted {fit.error:.0%} wrong in the median of {fit.held_out} "
                f"held-out points, at most {ERROR_MAX:.0%} will do"
            )
    return tuple(said)


def _stage(stage: str, errors: Sequence[float], points: int) -> StageFit:
    if not errors:
        return StageFit(stage, 0.0, 0.0, 0, points)
    return StageFit(stage, round(median(errors), 5), round(max(errors), 5), len(errors), points)


def _prefill_errors(profile: ClassProfile) -> list[float]:
    points = profile.prefill_points
    errors = []
    for i in range(1, len(points) - 1):
        rest = replace(profile, prefill_points=points[:i] + points[i + 1 :])
        tokens, ms = points[i]
        errors.append(abs(rest.prefill_s(tokens) * 1e3 / (ms * profile.slow_factor) - 1.0))
    return errors


def _decode_errors(profile: ClassProfile) -> list[float]:
    points = profile.decode_points
    if len(points) < DECODE_POINTS_MIN - 1:
        return []
    errors = []
    for i, (sequences, kv_tokens, ms) in enumerate(points):
        rest = replace(profile, decode_points=points[:i] + points[i + 1 :])
        predicted = rest.iteration_s(sequences, kv_tokens) * 1e3
        errors.append(abs(predicted / (ms * profile.slow_factor) - 1.0))
    return errors
