"""`make bench-startup`: T_ready by segment, by what a start finds.

Prints at the end

    bench-startup-modelled ready_ratio= compile_ratio= unexplained=
    bench-startup ready_ratio= compile_ratio= unexplained=

The first line is of modelled engines over a large artifact of real bytes: registry, router, agents and
engines are processes, weights are published, fetched, verified and mapped; only parallel_init, compile,
cuda_graph, kv_profile and warmup are slept, so that their ratios say what was put in. The second line is
of a real vLLM with a tiny model, on this machine's processor, from `make vllm-env`: prefill workers,
beside a decode worker with which they prove their KV.

ready_ratio: T_ready of a start that finds everything (weights in its node's cache, compiled code, a
measured KV size, a process that has imported everything) over one that finds nothing (weights in the
registry's store). compile_ratio: median compile segment of the starts that found compiled code over
that of those that did not. unexplained: the worst share of T_ready that no segment explains.

A standby's T_ready begins with the word to serve, and the time until its agent has heard it is its
schedule. A start counts only where its own trace says that it found what its cell promises; what is
left out or could not be run is said with the reason, and a figure without starts is nan. The order of
the starts follows from the seed; times are medians over the starts of a cell (`--starts`).

`--limit-s` begins no start after so long, and `--into FOLDER` keeps each start: run again with the same
folder, the bench takes what is left and reports all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from bench.startup_cells import (
    Cell,
    Figures,
    cold_cell,
    essential,
    matrix,
    mistaken,
    table,
    warm_cell,
    widest_gap,
)
from bench.startup_kept import Kept
from bench.startup_site import Engine, NotStarted, Site, site_of, standby_missing
from bench.startup_vllm import vllm_engine
from readyplane.core.errors import ReadyplaneError
from readyplane_lab.up.demo_model import make_demo_model
from readyplane_registry.ingest import Facts

MODELLED, VLLM = "modelled", "vllm"
CLASS = "h200-llama8b-fp8"
SIZE_BYTES, SIZE_QUICK_BYTES = 1_500_000_000, 200_000_000
SHARDS = 4
DEVICE_BYTES = 32 * 2**30
SEGMENTS = "parallel_init=0.5,compile=4,cuda_graph=1.5,kv_profile=1.5,warmup=0.3"
SEGMENTS_QUICK = "parallel_init=0.1,compile=1,cuda_graph=0.3,kv_profile=0.4,warmup=0.1"
SAID_FROM = 0.002


def modelled_engine(*, quick: bool) -> Engine:
    """Modelled engines with a device whose KV size they measure."""
    return Engine(
        MODELLED,
        args=(
            *("--worker-class", CLASS),
            f"--engine-arg=--device-bytes={DEVICE_BYTES}",
            f"--engine-arg=--modelled-segments={SEGMENTS_QUICK if quick else SEGMENTS}",
        ),
        # Other co-tenants on the device, and no size that was measured before holds (R16.1).
        full_arg="--engine-arg=--device-taken-bytes={taken}",
    )


async def measure(
    site: Site, cells: tuple[Cell, ...], *, given: argparse.Namespace, kept: Kept | None
) -> Figures:
    """Every cell so many times, in an order that follows from the seed, as far as the time goes."""
    until_s = site.clock.monotonic_s() + (given.limit_s or math.inf)
    sizes = site.engine.sizes_kv
    figures = Figures(cold_cell(sizes_kv=sizes), warm_cell(sizes_kv=sizes, standby=True))
    missing = standby_missing()
    runnable = [cell for cell in cells if not (cell.standby and missing)]
    figures.not_run |= {cell.name: missing for cell in cells if cell.standby and missing}
    shuffled = [cell for _ in range(given.starts) for cell in runnable]
    random.Random(given.seed).shuffle(shuffled)
    if kept is not None:
        figures.taken += kept.taken
        shuffled = kept.left(shuffled)
        print(f"{len(kept.taken)} starts were taken before, {len(shuffled)} are left", flush=True)
    if not shuffled:
        return figures
    first = await site.prime(runnable)
    if site.engine.partner and first and figures.cold in shuffled:
        # Each start takes a minute or more: the first one, which found nothing, is one of the cold.
        figures.taken += first
        if kept is not None:
            kept.add(first[0])
        shuffled.remove(figures.cold)
        share, gap = first[0].path.unexplained_fraction, widest_gap(first[0])
        print(
            f"  0 {figures.cold.name} {first[0].path.wall_s:7.2f} s, "
            f"compile {first[0].compile_s:.2f} s, {share:.2%} unexplained ({gap}), the first",
            flush=True,
        )
    for number, cell in enumerate(shuffled, 1):
        if site.clock.monotonic_s() > until_s:
            for late in shuffled[number - 1 :]:
                figures.not_run.setdefault(late.name, f"{given.limit_s:.0f} s were over")
            break
        try:
            taken = await site.start(cell)
        except (NotStarted, ReadyplaneError) as error:
            figures.not_run.setdefault(cell.name, str(error).partition("\n")[0])
            print(f"{number:>3} {cell.name} did not start: {error}", flush=True)
            continue
        wrong = mistaken(taken)
        share = taken.path.unexplained_fraction
        gap = f" ({widest_gap(taken)})" if share > SAID_FROM else ""
        print(
            f"{number:>3} {cell.name} {taken.path.wall_s:7.2f} s, compile {taken.compile_s:.2f} s, "
            f"{share:.2%} unexplained{gap}" + "".join(f"; left out: {why}" for why in wrong),
            flush=True,
        )
        if wrong:
            figures.not_run.setdefault(cell.name, wrong[0])
        else:
            figures.taken.append(taken)
            if kept is not None:
                kept.add(taken)
    return figures


def report(name: str, figures: Figures, cells: tuple[Cell, ...]) -> None:
    """The table of one engine."""
    print(f"\n{name}: T_ready and mean exclusive seconds by segment")
    print("\n".join(table(figures, cells)), flush=True)


async def run(folder: Path, given: argparse.Namespace) -> dict[str, Figures]:
    """Both engines, one after the other; says why one was not run."""
    out: dict[str, Figures] = {}
    for name in given.engines.split(","):
        try:
            if name == VLLM:
                engine, model, facts = await vllm_engine(folder)
                whole = given.vllm_matrix
            else:
                size = given.bytes or (SIZE_QUICK_BYTES if given.quick else SIZE_BYTES)
                demo = make_demo_model(
                    folder / "model", size_bytes=size, shards=SHARDS, seed=given.seed
                )
                engine, model = modelled_engine(quick=given.quick), demo.folder
                facts, whole = Facts(config=demo.config, canary=demo.canary), not given.quick
            cells = (matrix if whole else essential)(sizes_kv=engine.sizes_kv)
            kept = kept_of(given, engine, model)
            async with site_of(folder / name, model, facts, engine) as site:
                figures = await measure(site, cells, given=given, kept=kept)
        except (ReadyplaneError, NotStarted) as error:
            print(f"{name}: not run: {error}", flush=True)
            continue
        report(name, figures, cells)
        out[name] = figures
        shutil.rmtree(folder / name, ignore_errors=True)
    return out


def kept_of(given: argparse.Namespace, engine: Engine, model: Path) -> Kept | None:
    """Where the starts of an engine are kept, None where they are not.

    Raises:
        InvalidField: there are starts of another engine, or of other weights.
    """
    if given.into is None:
        return None
    size = sum(path.stat().st_size for path in model.iterdir() if path.is_file())
    words = [word for word in engine.args if str(model.parent) not in word]
    return Kept(given.into, engine.name, {"args": words, "bytes": size})


def line(name: str, figures: Figures | None) -> str:
    """The figures of one engine, nan for one that was not run."""
    cold, warm = cold_cell(sizes_kv=True), warm_cell(sizes_kv=True, standby=True)
    return (figures or Figures(cold, warm)).line(name)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="T_ready by segment, by what a start finds")
    parser.add_argument("--starts", "--repeats", type=int, default=1, help="starts of each cell")
    parser.add_argument("--seed", type=int, default=1, help="of the artifact and of the order")
    parser.add_argument("--bytes", type=int, default=0, help="size of the modelled artifact")
    parser.add_argument("--engines", default=f"{MODELLED},{VLLM}", help="which of both, in order")
    parser.add_argument(
        "--into", type=Path, help="keep each start there, and start only what is not there yet"
    )
    parser.add_argument(
        "--limit-s", type=float, default=0.0, help="begin no start later than this, of one engine"
    )
    parser.add_argument("--vllm-matrix", action="store_true", help="every cell on vLLM, an hour")
    parser.add_argument("--quick", action="store_true", help="few cells, a small artifact, no vLLM")
    given = parser.parse_args()
    unknown = set(given.engines.split(",")) - {MODELLED, VLLM}
    if given.starts < 1 or given.limit_s < 0 or unknown:
        parser.error(
            f"give --starts from 1, --limit-s from 0, and --engines of {MODELLED} and {VLLM}"
        )
    if given.quick:
        given.engines = MODELLED
        print(f"{VLLM}: not run: --quick", flush=True)
    # Asked to end, it ends what it has started, as with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="readyplane-startup-") as folder:
        found = asyncio.run(run(Path(folder), given))
    print(line("bench-startup-modelled", found.get(MODELLED)))
    print(line("bench-startup", found.get(VLLM)))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
