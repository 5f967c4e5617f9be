"""How much work a workload is, and how many workers it needs at least when: the oracle's input.

Owns the work of single requests in worker-seconds, as a true lower bound, and the series of least
ready workers made of it. Handed to the bounds (`layers`, `floor`, `milp`) and to every rule that
is allowed hindsight.

The work of a request in the prefill pool is the profile's time for its uncached prompt tokens. To
compute it in several chunks takes at least as long, since the times of the chunks add up to the
curve's rise over the whole prompt.

The work in the decode pool. An iteration with the sequences B takes `L = a + sum(w_i)`, where
`w_i = b + c * kv_i` and `kv_i` grows by one a token. The `w_i` are the request's own; `a` is
shared, and a request is charged the least part of it that any batching can leave it with:

* *by time*: split `a` in proportion to fixed weights `l_i <= w_i`, here `b + c * isl`, the cost of
  the first token that counts for TPOT. A request with `m = osl - 1` such tokens is charged
  `sum_k a * l_i / l(B_k)`, by Jensen at least `a * l_i * m**2 / sum_k l(B_k)`. Its TPOT is a mean,
  so single iterations may take longer than `T`, yet `sum_k (a + l(B_k)) <= sum_k L_k <= m * T`.
  Hence at least `m * l_i * a / (T - a)`: what it would be at iterations of exactly `T`.
* *by count*: split evenly; at most `max_num_seqs` share an iteration.
* *by memory*: split in proportion to KV held; at most `kv_capacity_tokens` are resident. Of a
  prompt only the blocks count that no earlier request brought, since others may be shared.

Each split bounds every request at once, but a mixture does not: a batch of long and of short
requests may fill time with the ones and memory with the others. So one split is taken for the
whole workload, the one that charges most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.core.work import Slo
from readyplane_lab.proof.port import Hindsight
from readyplane_lab.simulator.outcome import Floats
from readyplane_lab.workload.request import WorkloadRequest

ROUNDING = 1e-9
STRETCHES_MAX = 400_000
"""Ends of stretches that are looked at; longer workloads are looked at less finely."""


@dataclass(frozen=True, slots=True)
class Work:
    """Columns over requests; seconds of one worker at the best operating point within the SLO.

    Attributes:
        at_s: arrival. prefill_s, decode_s: worker-seconds of work in each pool.
        residence_s: shortest possible time in the decode pool, alone in its batch.
        allowed_s: longest one that the SLO allows, at iterations of exactly TPOT.
    """

    at_s: Floats
    prefill_s: Floats
    decode_s: Floats
    residence_s: Floats
    allowed_s: Floats

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True, slots=True)
class Foresight(Hindsight):
    """Hindsight with the needs before they are rounded up, for margins that multiply them.

    Attributes:
        load_p, load_d: workers that each step needs when work is spread as late and as evenly as
            the SLO allows.
    """

    load_p: Floats
    load_d: Floats


def request_work(
    requests: Sequence[WorkloadRequest],
    *,
    prefill: ClassProfile,
    decode: ClassProfile,
    slo: Slo,
    cached: Floats | None = None,
    strict: bool = False,
) -> Work:
    """The work of each request.

    Args:
        requests: in order of arrival. cached: prompt tokens that need not be computed, of
            `ideal_cached`; None: nothing is shared.
        strict: what no schedule whatever can undercut, for `floor`. Then the first token may come
            from the prefill itself, as where one worker does both, and a shared prefix may be
            computed for whichever of its holders is served first.

    Raises:
        InvalidField: a decode class whose lone iteration takes longer than the TPOT target.
    """
    a, b, c = decode.decode_coefficients_s()
    if slo.tpot_s <= a + b:
        raise InvalidField("slo.tpot_s", slo.tpot_s, f"an empty iteration takes {a + b:.4f} s")
    at_s = np.array([r.at_s for r in requests], dtype=float)
    isl = np.array([r.isl for r in requests], dtype=float)
    osl = np.array([r.osl for r in requests], dtype=float)
    held = np.zeros_like(isl) if cached is None else np.minimum(cached, isl - 1.0)
    later = osl - 1.0
    first = b + c * (isl - 1.0)
    own = later * (b + c * isl) + c * later * (later - 1.0) / 2.0  # KV tokens isl, isl + 1, ...
    alone = own + first
    shares = (
        later * (b + c * isl) / (slo.tpot_s - a),
        osl / decode.max_num_seqs,
        osl * (isl - held + (osl - 1.0) / 2.0 - 1.0) / decode.kv_capacity_tokens,
    )
    if strict:  # without the first iteration in the decode pool
        shares = (shares[0], shares[1] * later / osl, shares[2] * later / osl)
    share = max(shares, key=lambda column: float(column.sum()))
    return Work(
        at_s=at_s,
        prefill_s=_reordered_s(prefill, isl, held)
        if strict and bool(held.any())
        else _prefill_s(prefill, isl, held),
        decode_s=(own if strict else alone) + a * np.maximum(0.0, share),
        residence_s=a * osl + alone,
        allowed_s=slo.tpot_s * osl,
    )


def _prefill_s(profile: ClassProfile, isl: Floats, held: Floats) -> Floats:
    """The profile's times; each pair of lengths is looked up once."""
    pairs, where = np.unique(isl + 1j * held, return_inverse=True)
    times = [profile.prefill_s(p.real - p.imag, p.imag) for p in pairs.tolist()]
    return np.array(times, dtype=float)[where.reshape(-1)]


def _reordered_s(profile: ClassProfile, isl: Floats, held: Floats) -> Floats:
    """Prefill times that hold for whatever order prompts with shared blocks are served in.

    A shared block is charged to whoever arrived first with it, but may be computed in the prompt
    of somebody served earlier, together with other blocks. So only a price splits without loss
    that is a sum over prompts and over tokens: the rise of the curve over the places of the
    tokens, or a straight line under the curve, `level` a prompt and `slope` a token. Either is at
    most what the profile says; the one that charges this workload most is taken.
    """
    own = isl - held
    x = np.array([1.0, *(p[0] for p in profile.prefill_points)])
    x = np.append(x, 2.0 * max(float(x[-1]), float(isl.max())))
    y = _curve_s(profile, x)
    best = _curve_s(profile, isl) - np.where(held > 0, _curve_s(profile, held), y[0])
    for i, j in combinations(range(len(x)), 2):
        slope = (y[j] - y[i]) / (x[j] - x[i])
        level = y[i] - slope * x[i]
        if level >= 0.0 and bool(np.all(level + slope * x <= y + ROUNDING)):
            best = max(best, level + slope * own, key=np.sum)
    return best


def _curve_s(profile: ClassProfile, tokens: Floats) -> Floats:
    return _prefill_s(profile, tokens, np.zeros_like(tokens))


def ideal_cached(requests: Sequence[WorkloadRequest], block_size: int) -> Floats:
    """Prompt tokens that an endless prefix cache would hold for each request.

    Whole blocks count, from the arrival of their first holder on. The last token is always
    computed, as in every engine. Prompts are compared by their parts in a tree of prefixes, which
    says the same as their block hashes; one whose first stream is nobody else's shares nothing.

    Args:
        requests: in order of arrival.
    """
    begins = Counter(r.parts[0][0] for r in requests if r.parts)
    longest: dict[tuple[int, int], int] = {}  # (prefix, stream) -> most tokens of it seen
    prefixes: dict[tuple[int, int, int], int] = {}  # (prefix, stream, tokens) -> longer prefix
    held = np.zeros(len(requests))
    for i, request in enumerate(requests):
        if not request.parts or begins[request.parts[0][0]] == 1:
            continue
        at, common, shared = 0, 0, True
        for seed, length in request.parts:
            known = longest.get((at, seed), 0)
            common += min(known, length) if shared else 0
            longest[at, seed] = max(known, length)
            after = prefixes.get((at, seed, length))
            shared = shared and after is not None
            if after is None:
                after = prefixes[at, seed, length] = len(prefixes) + 1
            at = after
        held[i] = min(common, request.isl - 1) // block_size * block_size
    return held


def hindsight(work: Work, *, slo: Slo, step_s: float, span_s: float) -> Foresight:
    """What arrives and what is needed in each step of [0, span].

    A step needs the larger of two. First its mean load, when the work of each request is spread
    evenly from its arrival over the time that the SLO leaves: in the prefill pool TTFT less one
    iteration, in the decode pool the longest residence. Second what its densest moments need to be
    through one such time later (`bursts`), which a mean over a longer step hides.

    Args:
        step_s: of the grid. span_s: first to last arrival.
    """
    steps = max(1, int(np.ceil(span_s / step_s - ROUNDING)))
    edges: Floats = step_s * np.arange(steps + 1, dtype=np.float64)
    slack_s = np.maximum(slo.ttft_s - slo.tpot_s, work.prefill_s)
    at = np.clip((work.at_s / step_s).astype(int), 0, steps - 1)
    loads = [
        np.maximum(
            np.diff(spread(begin_s, begin_s + length_s, amount, edges)) / step_s,
            bursts(begin_s, amount, within_s=_mean(length_s, amount), step_s=step_s, steps=steps),
        )
        for begin_s, length_s, amount in (
            (work.at_s, slack_s, work.prefill_s),
            (work.at_s + work.prefill_s, work.allowed_s, work.decode_s),
        )
    ]
    return Foresight(
        step_s=step_s,
        work_p=np.bincount(at, work.prefill_s, steps).astype(float),
        work_d=np.bincount(at, work.decode_s, steps).astype(float),
        need_p=whole(loads[0]),
        need_d=whole(loads[1]),
        load_p=loads[0],
        load_d=loads[1],
    )


def bursts(at_s: Floats, amount: Floats, *, within_s: float, step_s: float, steps: int) -> Floats:
    """Workers that the densest stretch of each step needs, by themselves.

    What arrives from a first moment to a last one must be through `within_s` after the last, so it
    needs its work over that whole time, workers from the first moment until then. Stretches of up
    to half of `within_s`, and up to four times that, are looked at, as far as a step is longer; of
    longer ones the mean tells.

    Args:
        at_s: when work arrives, sorted or not. amount: worker-seconds of it.
    """
    need = np.zeros(steps)
    if not len(at_s):
        return need
    order = np.argsort(at_s, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(amount[order])))
    when_s = at_s[order]
    grain_s = max(within_s / 4.0, steps * step_s / STRETCHES_MAX)
    ends_s: Floats = grain_s * np.arange(1, np.ceil(steps * step_s / grain_s) + 1)
    behind = np.searchsorted(when_s, ends_s)
    for length_s in within_s * np.array([0.5, 1.0, 2.0, 4.0]):
        ahead = np.searchsorted(when_s, ends_s - length_s)
        some = behind > ahead
        if length_s > step_s or not some.any():
            continue
        first_s, due_s = when_s[ahead[some]], when_s[behind[some] - 1] + within_s
        rate = (total[behind[some]] - total[ahead[some]]) / (due_s - first_s)
        first = np.clip((first_s / step_s).astype(int), 0, steps - 1)
        last = np.clip(np.ceil(due_s / step_s).astype(int) - 1, first, steps - 1)
        for further in range(int((last - first).max()) + 1):
            inside = first + further <= last
            np.maximum.at(need, (first + further)[inside], rate[inside])
    return need


def _mean(values: Floats, weights: Floats) -> float:
    total = float(weights.sum())
    return float((values * weights).sum()) / total if total > 0 else float(values.mean())


def spread(begin_s: Floats, end_s: Floats, amount: Floats, at_s: Floats) -> Floats:
    """Sum of amounts, each growing evenly from its begin to its end, read at some instants."""
    rate = amount / np.maximum(end_s - begin_s, ROUNDING)
    total = np.zeros(len(at_s))
    for marks, sign in ((begin_s, 1.0), (end_s, -1.0)):
        order = np.argsort(marks, kind="stable")
        upto = np.searchsorted(marks[order], at_s, side="right")
        rates = np.append(0.0, np.cumsum(rate[order]))[upto]
        moments = np.append(0.0, np.cumsum((rate * marks)[order]))[upto]
        total += sign * (rates * at_s - moments)
    return np.maximum.accumulate(np.maximum(total, 0.0))


def whole(load: Floats) -> Floats:
    """Least whole workers for a load."""
    return np.maximum(0.0, np.ceil(load - 1e-6))


def peak_workers(known: Hindsight) -> float:
    """The largest need of both pools together."""
    return float((known.need_p + known.need_d).max(initial=0.0))
