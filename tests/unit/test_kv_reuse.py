"""The KV size of a start: taken over, refused, withdrawn; and what is seen of a device's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane import profiles
from readyplane.core.compile_key import CompileFacts, absent, compile_key, known, unknown
from readyplane.core.errors import Unavailable
from readyplane.core.startup import Segment, SegmentName, StartMode
from readyplane_agent.engines.modelled import memory
from readyplane_agent.engines.modelled.settings import parse
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.failed_plans import PLANS_MAX, FailedPlans
from readyplane_agent.kv_memory import Device, MemoryProbe, container_limit_bytes
from readyplane_agent.kv_reuse import KvReuse
from tests.unit.test_compile_cache import FACTS, MODEL, Held, World, world

__all__ = ["world"]
GIB = 2**30
KEY = compile_key(CompileFacts(FACTS))
PROFILE = profiles.load("h200-llama8b-fp8")


class Engine:
    """A modelled engine's account, without the engine."""

    def __init__(self, spec: EngineSpec, *, device: int = 8 * GIB, taken: int = 0) -> None:
        words = ["--model", "m", "--arena", "a", "--tensor-table", "t", "--config", "c"]
        words += ["--profile", "p", "--device-bytes", str(device)]
        words += ["--device-taken-bytes", str(taken), "--kv-reuse-bytes", str(spec.kv_reuse_bytes)]
        settings = parse(words)
        self.account = memory.account_of(settings, PROFILE, weights_bytes=GIB, block_size=16)

    def memory_account(self) -> Mapping[str, Any]:
        return self.account.document()

    def segments(self) -> list[Segment]:
        told = f"refused: {self.account.refused}" if self.account.refused else "measured"
        return [Segment(SegmentName.KV_PROFILE, 0.0, 1.0, detail=told)]


def start(world: World, *, device: int = 8 * GIB, taken: int = 0) -> tuple[KvReuse, EngineSpec]:
    cache, spec = world.start("n1")
    moves = cache._bytes
    assert isinstance(moves, Held)
    words = (f"--device-bytes={device}", f"--device-taken-bytes={taken}")
    spec = replace(spec, extra_args=words)
    registry: Any = world.registry
    look, failed = MemoryProbe("modelled", {}).look, FailedPlans(world.tmp / "kv-failed.json")
    return KvReuse(registry=registry, look=look, bytes_of=moves, failed=failed), spec


async def life(world: World, **device: int) -> tuple[KvReuse, EngineSpec, str]:
    kv, spec = start(world, **device)
    given, told = await kv.prepare(spec, MODEL, KEY)
    engine = Engine(given, **device)
    await kv.judge(engine.segments())
    await kv.keep(engine, MODEL)
    return kv, given, told


async def test_what_was_measured_is_taken_over_with_the_same_blocks(world: World) -> None:
    first, spec, told = await life(world)
    assert told == "KV size to be measured: absent"
    assert first.counts == {("refused", "absent"): 1, ("published", "published"): 1}
    second, given, told = await life(world)
    assert told.startswith("KV size reused")
    assert second.counts == {("reused", "registry"): 1}
    before, after = Engine(spec).account, Engine(given).account
    assert before.measured and not after.measured
    assert after.blocks == before.blocks


async def test_beside_a_neighbour_it_is_measured_anew(world: World) -> None:
    await life(world)
    kv, given, told = await life(world, taken=GIB)
    assert given.kv_reuse_bytes == 0
    assert "fingerprint_mismatch" in told and "kv.co_tenant_bytes: 0 != " in told
    assert ("published", "published") in kv.counts, "under a fingerprint of its own"


async def test_a_size_that_the_engine_refuses_is_withdrawn_and_never_tried_again(
    world: World,
) -> None:
    await life(world)
    kv, spec = start(world)
    given, _ = await kv.prepare(spec, MODEL, KEY)
    assert given.kv_reuse_bytes
    # Something else has come onto the device since anybody looked.
    engine = Engine(given, taken=3 * GIB)
    assert engine.account.measured and engine.account.refused
    await kv.judge(engine.segments())
    assert kv.counts[("refused", "engine")] == 1
    again, given, told = await life(world)
    assert given.kv_reuse_bytes == 0 and "absent" in told
    # It measures the same size again: the same plan, which stays withdrawn.
    assert ("published", "published") in again.counts
    _, given, told = await life(world)
    assert given.kv_reuse_bytes == 0


async def test_a_plan_that_failed_is_not_tried_again_where_the_registry_could_not_be_told(
    world: World,
) -> None:
    await life(world)
    kv, spec = start(world)
    given, _ = await kv.prepare(spec, MODEL, KEY)
    assert given.kv_reuse_bytes
    tell = world.registry.set_tag

    async def away(*_: Any, **__: Any) -> Any:
        raise Unavailable("the registry is away", "wait")

    world.registry.set_tag = away  # type: ignore[method-assign]
    await kv.failed()
    world.registry.set_tag = tell  # type: ignore[method-assign]
    kv, spec = start(world)
    given, told = await kv.prepare(spec, MODEL, KEY)
    assert given.kv_reuse_bytes == 0 and "this plan failed before" in told
    assert kv.counts == {("refused", "failed"): 1}


def test_failed_plans_are_bounded_and_a_torn_file_holds_none(tmp_path: Path) -> None:
    failed = FailedPlans(tmp_path / "deep" / "kv-failed.json")
    assert failed.known() == frozenset()
    for n in range(PLANS_MAX + 3):
        failed.add(f"sha256:{n}")
    assert len(failed.known()) == PLANS_MAX and "sha256:2" not in failed.known()
    (tmp_path / "deep" / "kv-failed.json").write_text("[")
    assert failed.known() == frozenset()


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--max-lora-rank=16",), "lora"),
        (("--enable-lora", "--lora-modules=a=b"), "lora"),
        (("--mm-encoder-tp-mode=data",), "encoder"),
        (("--mm-encoder-attn-backend=torch",), "encoder"),
        (("--language-model-only",), "encoder"),
    ],
)
def test_lora_and_encoder_count_whatever_flag_says_so(
    world: World, words: tuple[str, ...], field: str
) -> None:
    spec = replace(world.start("n1")[1], extra_args=("--device-bytes=1000000", *words))
    facts, _ = MemoryProbe("modelled", {}).look(spec, MODEL)
    assert getattr(facts, field) != "none"
    for word in words:
        assert word.partition("=")[0] in getattr(facts, field)


def test_a_size_of_a_staged_start_holds_for_staged_starts_alone(world: World) -> None:
    spec = replace(world.start("n1")[1], extra_args=("--device-bytes=1000000",))
    whole, _ = MemoryProbe("modelled", {}).look(spec, MODEL)
    staged, _ = MemoryProbe("modelled", {}).look(replace(spec, graph_stages=True), MODEL)
    assert staged == replace(whole, graph_sizes=f"{whole.graph_sizes}, first stage")


async def test_a_start_that_fails_with_a_size_withdraws_it(world: World) -> None:
    await life(world)
    kv, spec = start(world)
    await kv.failed()
    given, _ = await kv.prepare(spec, MODEL, KEY)
    assert given.kv_reuse_bytes, "nothing was taken over, so nothing was withdrawn"
    await kv.failed()
    _, given, _ = await life(world)
    assert given.kv_reuse_bytes == 0


async def test_what_is_not_known_is_never_reused(world: World) -> None:
    await life(world)
    kv, spec = start(world)
    given, told = await kv.prepare(replace(spec, extra_args=()), MODEL, KEY)
    assert given.kv_reuse_bytes == 0
    assert "unknown: kv.co_tenant_bytes" in told
    hidden = compile_key(CompileFacts({**FACTS, "driver": unknown("hangs")}))
    _, told = await kv.prepare(spec, MODEL, hidden)
    assert "unknown: driver: hangs" in told
    lines = kv.metrics('worker_id="w"')
    assert 'readyplane_kv_size_refused_total{worker_id="w",reason="unknown"} 2' in lines


async def test_an_engine_without_an_account_publishes_nothing(world: World) -> None:
    kv, spec = start(world)
    await kv.prepare(spec, MODEL, KEY)
    await kv.keep(object(), MODEL)
    assert await world.registry.list_manifests(kind="kv_profile") == []


async def test_a_profile_that_nobody_trusted_has_signed_is_not_taken(world: World) -> None:
    await life(world)
    world.untrusted = True
    kv, given, told = await life(world)
    assert given.kv_reuse_bytes == 0 and "no signature" in told
    assert kv.counts[("refused", "refused")] == 1


async def test_a_damaged_profile_is_withdrawn(world: World) -> None:
    await life(world)
    world.bytes_of = dict.fromkeys(world.bytes_of, b"{}")
    kv, given, told = await life(world)
    assert given.kv_reuse_bytes == 0 and "wrong" in told
    assert kv.counts[("refused", "wrong")] == 1


# ------------------------------------------------------------------------------------ a real device


def probe(rows: str, pids: str = "", **environ: str) -> MemoryProbe:
    def run(command: Sequence[str], _environ: Mapping[str, str]) -> str:
        return pids if "--query-compute-apps=pid" in command else rows

    return MemoryProbe("vllm", environ, run=run, exists=lambda _: True)


def spec_of(world: World, *words: str) -> EngineSpec:
    return replace(world.spec(f"s{len(words)}", StartMode.JIT), extra_args=words)


def test_a_devices_memory_is_read_with_its_neighbours(world: World) -> None:
    facts, free = probe("81559, 10240, 71319\n", "7\n8\n").look(spec_of(world), MODEL)
    assert facts.device_total_bytes == 81559 * 2**20
    assert facts.co_tenant_bytes == 10 * GIB
    assert facts.co_tenants == 2
    assert free == known(71319 * 2**20)
    words = ("--gpu-memory-utilization", "0.8", "--block-size=32", "--max-loras", "4")
    facts, _ = probe("10, 0, 10").look(spec_of(world, *words), MODEL)
    assert (facts.memory_share, facts.block_size, facts.lora) == (0.8, 32, "--max-loras=4")
    facts, _ = probe("10, 0, 10").look(spec_of(world, "--block-size", "many"), MODEL)
    assert facts.block_size is None


@pytest.mark.parametrize("rows", ["", "1, 2, 3\n4, 5, 6\n", "[N/A], 1, 2\n"])
def test_a_device_that_does_not_say_is_not_known(world: World, rows: str) -> None:
    facts, free = probe(rows).look(spec_of(world), MODEL)
    assert facts.device_total_bytes is None
    assert free.value is None and free.problem


def test_without_a_device_nothing_is_known(world: World) -> None:
    found = MemoryProbe("vllm", {}, exists=lambda _: False).look(spec_of(world), MODEL)
    assert found[0].device_total_bytes is None
    assert Device().free != absent()
    limit = container_limit_bytes()
    assert limit is None or limit >= 0
    assert Path("/sys/fs/cgroup").exists() or limit is None
