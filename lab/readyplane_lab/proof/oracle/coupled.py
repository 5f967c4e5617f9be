"""A workload in the words of the programme of `milp`: what each step needs, what each class can do.

Owns the translation. Needs are those of `hindsight` on a coarse grid, with the KV that is resident
and handed over beside them; a class counts as so many workers of the reference class as it does
this very workload faster, on the mean over its requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from readyplane.core.profile import ClassProfile, LinkClass
from readyplane.core.work import Slo
from readyplane_lab.proof.oracle.demand import Work, hindsight, request_work, spread
from readyplane_lab.proof.oracle.milp import Kind, Needs
from readyplane_lab.simulator.outcome import Floats
from readyplane_lab.workload.request import WorkloadRequest

STEP_S = 60.0


def needs_of_workload(
    requests: Sequence[WorkloadRequest],
    work: Work,
    *,
    slo: Slo,
    kv_bytes_per_token: int,
    span_s: float,
    step_s: float = STEP_S,
) -> Needs:
    """What must be there in each step of [0, span].

    Args:
        requests: in order of arrival. work: of them, by the reference classes.
        kv_bytes_per_token: handed over from P to D for each prompt token.
    """
    known = hindsight(work, slo=slo, step_s=step_s, span_s=span_s)
    edges: Floats = step_s * np.arange(len(known.load_p) + 1, dtype=np.float64)
    isl = np.array([r.isl for r in requests], dtype=float)
    osl = np.array([r.osl for r in requests], dtype=float)
    begin_s = work.at_s + work.prefill_s
    held = (isl + (osl - 1.0) / 2.0) * work.residence_s
    moved_s = np.maximum(slo.ttft_s - work.prefill_s, slo.tpot_s)
    return Needs(
        step_s=step_s,
        prefill=known.load_p,
        decode=known.load_d,
        kv_tokens=np.diff(spread(begin_s, begin_s + work.residence_s, held, edges)) / step_s,
        kv_bytes_per_s=np.diff(
            spread(begin_s, begin_s + moved_s, isl * float(kv_bytes_per_token), edges)
        )
        / step_s,
    )


def kind_of(
    profile: ClassProfile,
    requests: Sequence[WorkloadRequest],
    work: Work,
    *,
    slo: Slo,
    lead_s: float,
    drain_s: float = 0.0,
    initial: tuple[int, int] = (0, 0),
    link: LinkClass | None = None,
    quota: int | None = None,
    cached: Floats | None = None,
) -> Kind:
    """A worker class as the programme sees it.

    Args:
        work: of the requests, by the reference classes. cached: with which it was worked out.
        lead_s, drain_s: of a start. initial: ready at the beginning. link: None: never too narrow.
    """
    prefill, decode = _able(profile, requests, work, slo=slo, cached=cached)
    return Kind(
        name=profile.name,
        gpus=profile.gpus,
        price_per_gpu_hour=profile.price_per_gpu_hour,
        prefill=prefill,
        decode=decode,
        lead_s=lead_s,
        drain_s=drain_s,
        initial=initial,
        kv_tokens=float(profile.kv_capacity_tokens),
        link_bytes_per_s=np.inf if link is None else link.bandwidth_bytes_per_s,
        quota=quota,
    )


def _able(
    profile: ClassProfile,
    requests: Sequence[WorkloadRequest],
    work: Work,
    *,
    slo: Slo,
    cached: Floats | None,
) -> tuple[float, float]:
    """Reference workers that one of the class replaces; none in D where it cannot keep TPOT."""
    keeps = slo.tpot_s > profile.iteration_s(1.0, 0.0)
    own = request_work(
        requests,
        prefill=profile,
        decode=profile,
        slo=slo if keeps else Slo(slo.ttft_s, np.inf),
        cached=cached,
    )
    decode = work.decode_s.sum() / own.decode_s.sum() if keeps else 0.0
    return float(work.prefill_s.sum() / own.prefill_s.sum()), float(decode)
