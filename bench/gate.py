"""How often the ready gate errs: seeded starts of modelled engines, with and without a fault.

Half of the starts are good, the others have each fault in turn. The order is shuffled by the seed.
A faulty worker that is admitted is a false ready, a good one that is not is a false refusal; both
must be 0. Whether the check that is there for a fault names it is counted besides.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.gate_starts import NAMED_BY, Outcome, Site

STARTS_DEFAULT = 200


def order(starts: int, seed: int) -> list[str]:
    """The fault of each start, "" for a good one."""
    names = sorted(map(str, NAMED_BY))
    faults = [names[i % len(names)] for i in range(starts // 2)]
    out = [*faults, *[""] * (starts - len(faults))]
    random.Random(seed).shuffle(out)
    return out


async def play(starts: int, seed: int) -> list[Outcome]:
    """All starts, one after another."""
    out: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        site = await Site.open(Path(folder), seed=seed)
        try:
            for number, fault in enumerate(order(starts, seed), 1):
                found = await site.start(fault)
                out.append(found)
                if found.false_ready or found.false_refuse or (fault and not found.named):
                    print(f"{number}: {fault or 'good'}: ready={found.ready} {found.reasons}")
        finally:
            await site.close()
    return out


def main() -> int:
    """Measure and print. Exit status 1 when the gate erred."""
    parser = argparse.ArgumentParser(description="how often the ready gate errs")
    parser.add_argument("--starts", type=int, default=STARTS_DEFAULT)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    found = asyncio.run(play(given.starts, given.seed))
    took = sorted(o.seconds for o in found)
    per_fault = Counter(o.fault for o in found if o.fault)
    named = Counter(o.fault for o in found if o.fault and o.named)
    for fault, count in sorted(per_fault.items()):
        print(f"{fault:>20} {named[fault]} of {count} named by {NAMED_BY[fault]}")
    false_ready = sum(o.false_ready for o in found)
    false_refuse = sum(o.false_refuse for o in found)
    unnamed = sum(bool(o.fault) and not o.named for o in found)
    print(f"{len(found)} starts, median {took[len(took) // 2]:.2f} s, {unnamed} faults not named")
    print(f"bench-gate false_ready={false_ready} false_refuse={false_refuse}")
    return 1 if false_ready or false_refuse else 0


if __name__ == "__main__":
    sys.exit(main())
