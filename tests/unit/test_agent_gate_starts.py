"""Whole starts with planted faults: none is let in, and the check that is there for it names it."""

from pathlib import Path

from bench.gate_starts import NAMED_BY, Site
from readyplane.core import gate_checks as gc
from readyplane_agent.engines.modelled.plants import Plant


async def test_each_planted_fault_is_refused_by_name_and_a_good_worker_is_not(
    tmp_path: Path,
) -> None:
    site = await Site.open(tmp_path)
    try:
        good = await site.start()
        assert good.ready, good.reasons
        assert {c.name for c in good.checks} == set(gc.GATE_CHECKS)
        for fault, check in NAMED_BY.items():
            found = await site.start(fault)
            assert not found.ready, fault
            assert found.named, (fault, found.reasons)
            if fault in set(Plant):  # the evidence stays with the worker, at the router
                kept = {c.name: c for c in found.checks}
                assert not kept[check].passed and kept[check].evidence, fault
    finally:
        await site.close()


async def test_two_faults_are_both_named(tmp_path: Path) -> None:
    site = await Site.open(tmp_path)
    try:
        found = await site.start(Plant.HALF_KV, ["--plant", Plant.CHOICES_IGNORED])
        assert not found.ready
        said = "; ".join(found.reasons)
        assert "kv_pool: " in said and "basics: " in said
    finally:
        await site.close()
