"""Real starts, segment by segment: explained to a fiftieth, one trace each, the failed ones too."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from bench.startup import DEVICE_BYTES
from bench.startup_cells import Cell, cold_cell, mistaken, warm_cell
from bench.startup_site import MODEL, Engine, Site, site_of
from readyplane.core.startup import SegmentName
from readyplane.kit.decision_trace import decision_ids
from readyplane_lab.up.demo_model import make_demo_model
from readyplane_registry.ingest import Facts
from tests.integration.collector import Collector, Span

DECISION = "d-9"
UNEXPLAINED_MAX = 0.02
WITHIN_S = 90.0
COLD = cold_cell(sizes_kv=True)
CELLS = (
    COLD,
    warm_cell(sizes_kv=True, standby=False),
    warm_cell(sizes_kv=True, standby=True),
    replace(COLD, code="eager"),
)
SHORT = "parallel_init=0.1,compile=0.4,cuda_graph=0.1,kv_profile=0.1,warmup=0.1"
ENGINE = Engine(
    "modelled",
    args=(
        *("--worker-class", "h200-llama8b-fp8", "--scale-decision-id", DECISION),
        f"--engine-arg=--device-bytes={DEVICE_BYTES}",
        f"--engine-arg=--modelled-segments={SHORT}",
    ),
    full_arg="--engine-arg=--device-taken-bytes={taken}",
)


@asynccontextmanager
async def small_site(folder: Path, collector: Collector) -> AsyncIterator[Site]:
    demo = make_demo_model(folder / "model", size_bytes=40_000_000, shards=2, max_model_len=4096)
    facts = Facts(config=demo.config, canary=demo.canary)
    engine = replace(ENGINE, environment={"READYPLANE_OTLP_ENDPOINT": collector.address})
    async with site_of(folder / "site", demo.folder, facts, engine) as site:
        yield site


async def failing(site: Site, name: str) -> None:
    """A start whose engine never ends an answer: the gate is not reached."""
    cell = Cell("local", "eager", "full", standby=False)
    words = site.words(name, mode=cell.mode, cache=site.local, key="kept")
    plant = ("--engine-arg=--plant", "--engine-arg=wrong_eos")
    environment = {**site.own.environment, **site.engine.environment}
    log = site.folder / "logs" / f"{name}.log"
    await site.own.table.spawn(name, [*words, *plant], environment, log)
    async with asyncio.timeout(WITHIN_S):
        while site.own.table.returncode(name) is None:
            await asyncio.sleep(0.05)


def traces_of(collector: Collector, count: int) -> dict[str, list[Span]]:
    """Spans of agents by the name of their worker, waited for until so many starts are there."""
    until_s = time.monotonic() + WITHIN_S
    found: dict[str, list[Span]] = defaultdict(list)
    while time.monotonic() < until_s:
        spans = [s for s in list(collector.spans) if s.service == "readyplane-agent"]
        found = defaultdict(list)
        for span in spans:
            found[span.attributes["readyplane.worker_id"]].append(span)
        if sum(s.name == "start" for s in spans) >= count:
            break
        time.sleep(0.1)
    return found


async def test_starts_are_explained_and_each_is_one_trace(tmp_path: Path) -> None:
    collector = Collector()
    try:
        async with small_site(tmp_path, collector) as site:
            await site.prime(CELLS)
            taken = [await site.start(cell) for cell in CELLS]
            await failing(site, "lost")
            (lost,) = [
                w
                for w in (await site.router.list_workers(MODEL)).workers.values()
                if w.worker_id == "lost"
            ]
        for each in taken:
            assert mistaken(each) == []
            assert each.path.unexplained_fraction <= UNEXPLAINED_MAX, each
        assert lost.progress is not None and "canary" in lost.progress.failure
        traces = await asyncio.to_thread(traces_of, collector, len(CELLS) + 1)
    finally:
        collector.stop()
    for number, each in enumerate(taken, 1):
        spans = traces[f"w{number}"]
        assert len({s.trace_id for s in spans}) == 1
        (root,) = [s for s in spans if s.name == "start"]
        told = {str(s.name) for s in each.segments} - {SegmentName.SCHEDULE}
        assert {s.name for s in spans} - {"start", "schedule"} == told
        trace_id, span_id = decision_ids(DECISION)
        assert root.links == ((f"{trace_id:032x}", f"{span_id:016x}"),)
        assert root.attributes["readyplane.tier"] == each.tier
        assert root.attributes["readyplane.mode"] == each.cell.mode
        took_s = root.end_s - root.start_s
        assert took_s <= each.path.wall_s + 0.1
    (root,) = [s for s in traces["lost"] if s.name == "start"]
    assert root.attributes["readyplane.ended_in"] == "canary"
    assert "canary" in root.attributes["readyplane.failure"]
