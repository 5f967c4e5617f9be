"""The textbook worlds, each with its simulated waits or residences and what theory says of them.

Owns the cases; the theory and the world are `bench.closed_forms`. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.closed_forms import (
    Estimate,
    Floats,
    batch_means,
    fair_shares_s,
    first_come_waits_s,
    iteration_points,
    md1_wait_s,
    mmc_wait_s,
    play,
    poisson,
    shared_residence_s,
    stream,
    textbook,
)
from readyplane.core.profile import LinkClass

SERVICE_S = 0.2
PROMPT = 1000  # tokens; a mean service where lengths are drawn


@dataclass(frozen=True, slots=True)
class Case:
    """One world.

    Attributes:
        simulated: of each request. recursion: of the same requests by an exact recursion, None
            where there is none. formula_s: mean in the long run, None where there is none.
    """

    name: str
    simulated: Floats
    recursion: Floats | None
    formula_s: float | None

    @property
    def estimate(self) -> Estimate:
        """Simulated mean with its interval."""
        return batch_means(self.simulated)

    @property
    def path_error_s(self) -> float:
        """Largest difference of one request from the recursion."""
        assert self.recursion is not None
        return float(np.abs(self.simulated - self.recursion).max())


def station(
    workers: int, *, drawn: bool, load: float = 0.7, count: int = 2000, seed: int = 1
) -> Case:
    """Prefill as a service station: M/D/c, or M/M/c with exponential prompt lengths."""
    rate = load * workers / SERVICE_S
    at_s = poisson(stream(seed, 1), rate, count)
    isl = np.full(count, PROMPT)
    if drawn:
        isl = np.maximum(1, np.rint(stream(seed, 2).exponential(PROMPT, count))).astype(np.int64)
    each_ms = SERVICE_S * 1e3 / PROMPT
    profile = textbook(prefill_points=[[1, each_ms], [100_000, 100_000 * each_ms]])
    played = play(at_s, [(int(n), 1) for n in isl], profile, fleet=(workers, 1))
    service = isl * (SERVICE_S / PROMPT)
    formula = mmc_wait_s(rate, SERVICE_S, workers) if drawn else None
    if workers == 1 and not drawn:
        formula = md1_wait_s(rate, SERVICE_S)
    return Case(
        f"M/{'M' if drawn else 'D'}/{workers}, load {load:g}",
        played.ttft_s - service,
        first_come_waits_s(at_s, service, workers),
        formula,
    )


def sharing(
    base_s: float,
    each_s: float,
    *,
    lengths: str,
    rate_rps: float = 2.0,
    mean: int = 200,
    count: int = 1500,
    seed: int = 2,
) -> Case:
    """Decode as sharing: iterations of base + each * sequences. `lengths`: D, M or H (two kinds)."""
    at_s = poisson(stream(seed, 1), rate_rps, count)
    generator = stream(seed, 2)
    osl = np.full(count, mean)
    if lengths == "M":
        osl = generator.geometric(1.0 / mean, count)
    elif lengths == "H":  # nine tenths are half as long, one tenth 5.5 times as long
        osl = np.where(generator.random(count) < 0.9, mean // 2, mean * 11 // 2)
    profile = textbook(decode_points=iteration_points(base_s, each_s))
    played = play(at_s, [(16, int(n)) for n in osl], profile)
    recursion = None
    if base_s == 0:
        recursion = np.array(fair_shares_s(at_s.tolist(), osl.tolist(), 1.0 / each_s))
    elif each_s == 0:
        recursion = osl * base_s
    kind = "PS" if base_s == 0 else "infinity" if each_s == 0 else "PS, base and share"
    return Case(
        f"M/{lengths}/{kind}",
        played.residence_s,
        recursion,
        shared_residence_s(rate_rps, float(osl.mean()), base_s, each_s),
    )


def handovers(
    at_s: list[float], tokens: list[int], fleet: tuple[int, int], *, bytes_per_s: float = 1e9
) -> Case:
    """KV hand-overs of a megabyte a token over one worker's link (the other stage has enough)."""
    profile = textbook(kv_bytes_per_token=1_000_000)
    link = LinkClass("narrow", bytes_per_s, 0.0)
    played = play(np.array(at_s), [(n, 1) for n in tokens], profile, fleet=fleet, link=link)
    sizes = [n * 1e6 for n in tokens]
    shared = np.array(fair_shares_s(at_s, sizes, bytes_per_s))
    return Case(f"D/D/1 sharing, {fleet[0]}P{fleet[1]}D", played.ttft_s, shared, None)


def every_case() -> Iterator[Case]:
    """The cases of the table, with more requests than the tests take."""
    yield station(1, drawn=False, load=0.7, count=8000)
    yield station(1, drawn=False, load=0.9, count=8000)
    yield station(3, drawn=False, load=0.8, count=8000)
    yield station(1, drawn=True, load=0.7, count=8000)
    yield station(3, drawn=True, load=0.8, count=8000)
    for lengths in "DMH":
        yield sharing(0.0, 0.001, lengths=lengths, rate_rps=3.0, count=5000)
    yield sharing(0.02, 0.0, lengths="M", count=3000)
    for lengths in "DMH":
        yield sharing(0.02, 0.001, lengths=lengths, count=5000)
    yield handovers([0.0] * 4, [1600] * 4, (4, 1))
    yield handovers([0.0, 0.8, 1.6], [1600] * 3, (4, 1))
    yield handovers([0.0, 0.1, 0.2], [1600, 160, 160], (1, 3))
