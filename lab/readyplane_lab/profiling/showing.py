"""What a profile says, in the words of people: capacities, errors, doubts, curves (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from readyplane.core.profile import ClassProfile
from readyplane_lab.profiling.fitting import fit_of, objections
from readyplane_lab.profiling.plot import plot

PROMPTS = (512, 2048, 8192)
CONTEXTS = (1000, 4000, 16_000)
CURVE_MARKS = ".-="


def capacities(profile: ClassProfile, *, itl_ms: float) -> dict[str, Any]:
    """The profile's capacities, fit and doubts as a JSON object; of one worker."""
    fit = profile.fit or (fit_of(profile) if profile.measured else ())
    itl_s = itl_ms / 1e3
    return {
        "name": profile.name,
        "worker_class": profile.worker_class,
        "source": profile.source,
        "measured": profile.measured,
        "digest": profile.digest,
        "gpus": profile.gpus,
        "price_per_gpu_hour": profile.price_per_gpu_hour,
        "slow_factor": profile.slow_factor,
        "prefill": [
            {
                "isl": isl,
                "seconds": profile.prefill_s(isl),
                "tokens_per_s": profile.prefill_tokens_per_s(isl),
                "extrapolated": isl > profile.prefill_points[-1][0],
            }
            for isl in PROMPTS
        ],
        "decode": [
            {
                "context": context,
                "itl_ms": itl_ms,
                "sequences": profile.decode_sequences(tpot_s=itl_s, context=context),
                "tokens_per_s": profile.decode_tokens_per_s(tpot_s=itl_s, context=context),
            }
            for context in CONTEXTS
        ],
        "iteration_ms": dict(
            zip(
                ("base", "per_sequence", "per_kv_token"),
                (1e3 * v for v in profile.decode_coefficients_s()),
                strict=True,
            )
        ),
        "kv_capacity_tokens": profile.kv_capacity_tokens,
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        "max_batch_tokens": profile.max_batch_tokens,
        "max_num_seqs": profile.max_num_seqs,
        "fit": [
            {
                "stage": f.stage,
                "error": f.error,
                "worst": f.worst,
                "held_out": f.held_out,
                "points": f.points,
            }
            for f in fit
        ],
        "doubts": list(doubts(profile)),
    }


def doubts(profile: ClassProfile) -> tuple[str, ...]:
    """What a planner should not take for certain."""
    if not profile.measured:
        return ("not measured: conservative assumptions, learned online, advice first",)
    said = list(objections(replace(profile, fit=profile.fit or fit_of(profile))))
    most = max(n for n, _, _ in profile.decode_points)
    if most < 0.5 * profile.max_num_seqs:
        said.append(
            f"measured up to {most:,.0f} sequences, and {profile.max_num_seqs} may run: beyond is a "
            f"straight line"
        )
    return tuple(said)


def plots(profile: ClassProfile) -> list[str]:
    """Prefill time by prompt length, and iteration time by sequences at three contexts."""
    slow = profile.slow_factor
    lines = plot(
        "prefill_ms by prompt tokens (o measured, . as planned with)",
        [(n, ms * slow) for n, ms in profile.prefill_points],
        [(".", lambda n: 1e3 * profile.prefill_s(n))],
        x_label="prompt tokens",
    )
    contexts = _contexts(profile)
    legend = "tokens " + ", ".join(
        f"{mark} {context:,.0f}" for mark, context in zip(CURVE_MARKS, contexts, strict=False)
    )
    lines += [
        "",
        *plot(
            f"iteration_ms by sequences (o measured; {legend})",
            [(n, ms * slow) for n, _, ms in profile.decode_points],
            [
                (mark, lambda n, c=context: 1e3 * profile.iteration_s(n, n * c))  # type: ignore[misc]
                for mark, context in zip(CURVE_MARKS, contexts, strict=False)
            ],
            x_label="sequences",
        ),
    ]
    return lines


def _contexts(profile: ClassProfile) -> Sequence[float]:
    """Shortest, middle and longest context of the measured loads; one where all are alike."""
    found = sorted(kv / n for n, kv, _ in profile.decode_points)
    chosen = (found[0], median(found), found[-1])
    return chosen if chosen[-1] > 1.5 * chosen[0] else chosen[1:2]
