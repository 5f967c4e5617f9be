"""`make bench-decide`: how long one choice of a pair takes, by the size of the fleet.

Times `readyplane_router.pair.decide` alone: two classes of workers, eight a machine, under load, every
prompt with a prefix on a few of them, and each choice booked before the next, as a desk does. Prints

    bench-decide decide_p50_us= decide_p99_us= prefill=512 decode=1024

The line is of the largest fleet; the smaller ones stand above it. CPU time: what else runs on the machine
does not count.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from readyplane import profiles
from readyplane.core.identity import KvFormat
from readyplane.core.work import Slo
from readyplane.core.worker import Role
from readyplane_router.pair import Ask, Chosen, PairPolicy, Seat, decide, kv_key, seat_key, times_of

FLEETS = ((8, 8), (64, 64), (512, 1024))
CLASSES = ("h100-tp4-llama70b", "a100-tp4-llama70b")
MACHINE = 8
WARM = 4
OPEN = 0.7
"""Share of the sequences that a decode worker takes within the TPOT target."""


def _seats(role: Role, count: int, generator: np.random.Generator) -> list[Seat]:
    kv = KvFormat("sha256:" + "0" * 64)
    made = []
    for number in range(count):
        name = f"{role.value[0]}{number}"
        times = times_of(profiles.load(CLASSES[number * 2 // count]))
        seat = Seat(
            worker_id=name,
            incarnation="i",
            key=seat_key(name, "i"),
            epoch=1,
            role=role,
            node=f"n{number // MACHINE}"
            if role is Role.PREFILL
            else f"n{number // MACHINE + 1000}",
            engine_url="http://127.0.0.1:1",
            kv=kv,
            kv_key=kv_key(kv),
            times=times,
            block_size=16,
            kv_total_blocks=29_000,
            max_num_seqs=256,
            max_model_len=131_072,
            sequences_cap=256,
            last_used=int(generator.integers(1_000)),
        )
        if role is Role.PREFILL:
            seat.works = {"before": float(generator.uniform(0.0, 0.9))}
            seat.work_s = sum(seat.works.values())
            seat.sending = int(generator.integers(2))
        else:
            seat.sequences = seat.decoding = int(generator.integers(20, int(60 * OPEN)))
            seat.kv_tokens = 3_000.0 * seat.sequences
            seat.kv_blocks = 200 * seat.sequences
            seat.transfers = int(generator.integers(2))
        made.append(seat)
    return made


def measure(prefill: int, decode: int, *, choices: int) -> tuple[float, float, float]:
    """Median and 99th percentile of a choice in microseconds, and the share that found a pair."""
    generator = np.random.Generator(np.random.Philox(key=prefill))
    ps, ds = _seats(Role.PREFILL, prefill, generator), _seats(Role.DECODE, decode, generator)
    policy = PairPolicy(slo=Slo(2.0, 0.1))
    taken_s, found = [], 0
    for number in range(choices):
        isl = int(generator.integers(200, 8_000))
        warm = [ps[int(i)] for i in generator.integers(prefill, size=WARM)]
        warm += [ds[int(i)] for i in generator.integers(decode, size=WARM)]
        cached = {s.key: isl // 2 // 16 * 16 for s in warm}
        ask = Ask(isl, policy.slo, 250.0, 600, 1_024, cached)
        began_s = time.thread_time()
        verdict = decide(ask, ps, ds, policy, now_s=0.0)
        taken_s.append(time.thread_time() - began_s)
        if isinstance(verdict, Chosen):
            found += 1
            verdict.prefill.last_used = verdict.decode.last_used = 1_000 + number
    p50, p99 = np.quantile(taken_s, (0.5, 0.99)) * 1e6
    return float(p50), float(p99), found / choices


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="time of one choice of a pair")
    parser.add_argument("--choices", type=int, default=1_000)
    choices = parser.parse_args().choices
    p50 = p99 = 0.0
    for prefill, decode in FLEETS:
        p50, p99, found = measure(prefill, decode, choices=choices)
        print(f"{prefill} P x {decode} D: p50 {p50:.0f} us, p99 {p99:.0f} us, {found:.0%} placed")
    print(
        f"bench-decide decide_p50_us={p50:.0f} decide_p99_us={p99:.0f} "
        f"prefill={FLEETS[-1][0]} decode={FLEETS[-1][1]}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
