"""`make bench-router`: the router beside its peers, part by part.

Each part is a bench of its own, prints what it found and ends with a line of figures:

    bench-router pick_unary_ratio= pick_batch_ratio= pick_p50_ratio= pick_cpu_ratio=
    ...

Ratios are ours by theirs. The parts run one after the other, each in a process of its own. Where the
peers are not installed a part says that it was not run, and its figures are nan.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

PARTS = {
    "pick": "bench.router_pick",
    "index": "bench.kv_index",
    "gateway": "bench.gateway",
    "decide": "bench.decide",
    "renew": "bench.renew",
}


def main() -> int:
    """Run the parts; 1 when one of them failed."""
    parser = argparse.ArgumentParser(description="the router beside its peers")
    parser.add_argument("--only", choices=sorted(PARTS), action="append")
    only = parser.parse_args().only
    failed = [
        name
        for name, module in PARTS.items()
        if only is None or name in only
        if subprocess.run([sys.executable, "-m", module], check=False).returncode
    ]
    if failed:
        print(f"these parts failed: {', '.join(failed)}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
