"""A convertible decoder from the policy to the engine's command line: decode supply, lent to prefill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from readyplane import profiles
from readyplane.core import convertible
from readyplane.core.errors import InvalidField
from readyplane.core.worker import LoadReport, Role, Worker, WorkerOffer, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.vllm_command import command
from readyplane_agent.settings import parse
from readyplane_planner.policy import make_plan, merged, read_policy
from readyplane_planner.signals import Priors, RouterSample, observe
from readyplane_router.members import check_offer
from tests.unit.planner_world import DIGEST, MODEL, HandClock, World, planner, policy

H200 = profiles.load("h200-llama8b-fp8")
TPOT_S = 0.1
LENT = merged(policy(), {"decode": {"convertible": True}})


def test_the_policy_makes_it_part_of_the_plan_with_the_time_that_is_kept() -> None:
    for asked in (True, False):
        made = make_plan(
            merged(policy(), {"decode": {"convertible": asked}, "slo": {"tpot_s": 0.04}}),
            version=1,
            manifest_digest=DIGEST,
        )
        assert made.decode.convertible_tpot_s == (0.04 if asked else 0.0)
        assert made.prefill.convertible_tpot_s == 0.0
    with pytest.raises(InvalidField, match="convertible"):
        read_policy({"model": "m", "prefill": {"convertible": True}})


async def test_orders_of_decode_workers_carry_it() -> None:
    run = await planner(World(HandClock()), LENT)
    await run.step(1)
    told = {order.role: order.convertible_tpot_s for order in run.world.provisions}
    assert told == {Role.PREFILL: 0.0, Role.DECODE: LENT.slo.tpot_s}


def worker(role: Role, *, lent: bool, tokens: int, at_s: float) -> Worker:
    offer = WorkerOffer(f"{role}-{lent}", "1", role, MODEL, "h200", convertible=lent)
    return Worker(
        offer,
        1,
        WorkerState.READY,
        load=LoadReport(
            running=2,
            waiting_prefill_tokens=500,
            prefill_tokens_total=tokens,
            iterations_total=round(10 * at_s),
        ),
        ready_s=1.0,
        renewed_s=at_s,
    )


def test_it_is_decode_supply_and_its_waiting_prompts_are_still_seen() -> None:
    def look(tokens: int) -> tuple[Role, float | None, float | None]:
        samples = [
            RouterSample(
                s,
                "r1",
                500.0 + s,
                gauges={"queued_tokens": 0.0, "prefilling_tokens": 0.0},
                workers=(worker(Role.BOTH, lent=True, tokens=n, at_s=s),),
            )
            for s, n in ((50.0, 0), (52.0, tokens))
        ]
        seen = observe(
            model=MODEL,
            previous=samples[0],
            current=samples[1],
            allocations=(),
            t_ready={},
            priors=Priors(),
            now_s=52.0,
        )
        (view,) = seen.workers
        assert view.convertible
        return view.role, view.iteration_s, seen.queue.value

    # An iteration that also computes a chunk says nothing of how fast the worker decodes.
    role, iteration_s, queued = look(tokens=0)
    assert (role, queued) == (Role.DECODE, 500.0) and iteration_s == pytest.approx(0.1)
    assert look(tokens=900) == (Role.DECODE, None, 500.0)
    assert worker(Role.BOTH, lent=False, tokens=0, at_s=1.0).offer.counts_as is Role.BOTH


def test_an_offer_of_one_serves_both_stages() -> None:
    good = WorkerOffer("d", "1", Role.BOTH, MODEL, "h200", manifest_digest="x", convertible=True)
    check_offer(good)
    with pytest.raises(InvalidField, match=r"offer\.role"):
        check_offer(replace(good, role=Role.DECODE))


FLAGS = [
    *("--worker-id", "w1", "--model", "m", "--router", "r:2", "--registry", "r:1"),
    *("--work-dir", "/tmp/w"),
]


def test_an_agent_is_told_so_for_a_decode_worker_of_its_own_only() -> None:
    lent = parse([*FLAGS, "--role", "decode", "--convertible-tpot-s", "0.1"], {})
    assert (lent.role, lent.serves) == (Role.DECODE, Role.BOTH)
    plain = parse([*FLAGS, "--role", "decode"], {})
    assert plain.serves is Role.DECODE
    for wrong in (("prefill", "0.1"), ("decode", "-1"), ("both", "0.1")):
        with pytest.raises(InvalidField, match="--convertible-tpot-s"):
            parse([*FLAGS, "--role", wrong[0], "--convertible-tpot-s", wrong[1]], {})


def spec(**changes: object) -> EngineSpec:
    nowhere = Path("/nowhere")
    made = EngineSpec(
        engine_id="e",
        role=Role.BOTH,
        model="m",
        manifest_digest="x",
        arena_path=nowhere,
        tensor_table_path=nowhere,
        config_path=nowhere,
        tokenizer_path=None,
        profile="h200-llama8b-fp8",
        work_dir=nowhere,
        log_path=nowhere,
        max_batch_tokens=convertible.chunk_tokens(H200),
        max_num_seqs=H200.max_num_seqs,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_engines_are_started_with_the_bound_of_a_chunk() -> None:
    words = command(spec(), model_dir=Path("/m"), port=1, replay_port=2)
    at = words.index("--max-num-batched-tokens")
    assert words[at + 1] == "513" and "--enable-chunked-prefill" in words
    assert words[words.index("--max-num-seqs") + 1] == "512"
    assert '"kv_role": "kv_both"' in words[words.index("--kv-transfer-config") + 1]
    plain = command(
        spec(role=Role.DECODE, max_batch_tokens=0, max_num_seqs=0),
        model_dir=Path("/m"),
        port=1,
        replay_port=2,
    )
    assert not {"--max-num-batched-tokens", "--enable-chunked-prefill"} & set(plain)
    assert '"kv_role": "kv_consumer"' in plain[plain.index("--kv-transfer-config") + 1]
    ours = ModelledEngine(SystemClock()).command(spec())
    assert ours[ours.index("--max-batch-tokens") + 1] == "513"


def test_each_target_has_a_told_profile_of_its_own() -> None:
    """A router knows a profile by its name; a changed target must not clash with older workers."""
    one, other = (convertible.told_profile(H200, tpot_s=s) for s in (0.1, 0.05))
    assert one.name == f"{H200.name}-convertible-100ms" and other.name.endswith("-50ms")
    assert one.digest != other.digest
    assert one.max_batch_tokens == other.max_batch_tokens == convertible.chunk_tokens(H200)
