"""What the validity bench rests on: the method for measured rows, and Dynamo's simulator if there.

The comparison with Dynamo's simulator needs `.venv-dynosim` (made by `make bench-validity`) and the
public trace; without them it is skipped. The whole tables stand in docs/simulator-validity.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import dynosim
from bench.measured import Row, closed_loop, form
from readyplane.core.profile import ClassProfile
from readyplane_lab.workload.trace import read_trace

SHARED = Path(os.environ.get("READYPLANE_DATA", Path(__file__).parents[3] / "shared" / "data"))
CONVERSATION = SHARED / "traces" / "mooncake_conversation.jsonl.zst"


def known() -> ClassProfile:
    a, b, c = 12.0, 0.05, 1e-4
    return ClassProfile(
        name="known",
        source="made up",
        worker_class="known",
        gpus=1,
        price_per_gpu_hour=1.0,
        prefill_points=((1024.0, 90.0), (8192.0, 600.0)),
        decode_points=tuple(
            (float(n), float(kv), a + b * n + c * kv)
            for n, kv in ((1, 1000), (64, 70_000), (8, 200_000), (128, 128_000))
        ),
        kv_capacity_tokens=10_000_000,
        kv_bytes_per_token=1,
    )


def measure(clients: int, isl: int, osl: int) -> Row:
    return Row("made-up", isl, osl, clients, *closed_loop(known(), clients, isl, osl))


def test_rows_of_a_known_engine_give_its_profile_back() -> None:
    rows = [measure(n, isl, 512) for n in (1, 4, 16, 48) for isl in (1024, 8192)]
    formed = form(rows)
    for clients, isl in ((2, 1024), (8, 8192), (32, 1024)):
        held = measure(clients, isl, 512)
        ttft_s, tpot_s = closed_loop(formed, clients, isl, 512)
        assert tpot_s == pytest.approx(held.tpot_s, rel=0.1)
        assert ttft_s == pytest.approx(held.ttft_s, rel=0.25)


def test_a_lone_client_waits_for_nobody() -> None:
    ttft_s, tpot_s = closed_loop(known(), 1, 1024, 100)
    assert ttft_s == pytest.approx(0.09)
    assert tpot_s == pytest.approx(0.012 + 0.00005 + 1e-7 * (1024 + 50), rel=0.01)


def test_fleets_rank_by_attainment_alike_or_not() -> None:
    def row(ours: float, theirs: float) -> dynosim.Compared:
        return dynosim.Compared((1, 1), "x", {"attainment": ours}, {"attainment": theirs})

    assert dynosim.kendall_tau([row(0.5, 0.6), row(0.8, 0.7), row(0.9, 0.9)]) == 1.0
    assert dynosim.kendall_tau([row(0.5, 0.9), row(0.8, 0.7), row(0.9, 0.6)]) == -1.0


@pytest.mark.skipif(
    not (dynosim.PYTHON.exists() and CONVERSATION.exists()),
    reason="needs .venv-dynosim (make .venv-dynosim/stamp) and the public Mooncake trace",
)
def test_dynamos_simulator_agrees_on_the_same_schedule() -> None:
    """The bounds are those asked of the whole trace; 800 requests of it are within them as well."""
    requests = read_trace(CONVERSATION, seed=0, limit=800).requests
    (row,) = dynosim.compare(requests, "h200-llama8b-fp8", [(3, 1)], [dynosim.MATCHED])
    assert row.ours["lost"] == row.theirs["lost"] == 0
    assert abs(row.error("mean_ttft")) < 0.05
    assert abs(row.error("mean_itl")) < 0.05
    assert abs(row.error("p99_ttft")) < 0.10
    assert abs(row.error("worker_s")) < 0.10
