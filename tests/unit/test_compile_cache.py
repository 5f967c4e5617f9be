"""Compiled code of a start: what is found, what is published, what is withdrawn, what is counted."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.compile_key import FACTORS, CompileFacts, Seen, known, unknown
from readyplane.core.errors import Refused, Unavailable
from readyplane.core.identity import FileEntry, Manifest
from readyplane.core.startup import Segment, SegmentName, StartMode, WeightTier
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.ports import FetchPlan, RankedSource, Source
from readyplane_agent import compile_cache, compile_publish
from readyplane_agent.compile_cache import CompileCache, Outcome
from readyplane_agent.compile_publish import CompileBytes, upload_url
from readyplane_agent.compile_store import CompileStore
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.reading import Reader
from readyplane_registry.blobs import MemoryBlobs
from readyplane_registry.live import MemoryLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.unit.agent_twins import artifact

MODEL = artifact().manifest
FACTS = {
    **{name: known(name) for name in FACTORS},
    "engine_version": known("modelled=1.0"),
    "capability": known("sm90"),
}


class Held(CompileBytes):
    """As in production, but bytes go into a dictionary instead of over HTTP."""

    world: "World"

    async def fetch(self, manifest: Manifest) -> dict[str, bytes]:
        await self._vouch(manifest)
        self.world.fetches += 1
        if self.world.away:
            raise Unavailable("the registry's storage is away", "wait")
        return {e.path: self.world.bytes_of[e.sha256] for e in manifest.files}


@dataclass
class World:
    """A registry, and starts on nodes."""

    tmp: Path
    registry: RegistryService
    blobs: MemoryBlobs
    bytes_of: dict[str, bytes] = field(default_factory=dict)
    fetches: int = 0
    away: bool = False
    untrusted: bool = False
    ids: Any = field(default_factory=itertools.count)

    async def vouch(self, manifest: Manifest) -> str:
        if self.untrusted:
            raise Refused(f"trust in {manifest.model!r}", ["no signature"])
        return ""

    def put(self, url: str, entry: FileEntry, path: Path, token: str) -> None:
        assert url == "http://r/v1/blobs/sha256"
        self.bytes_of[entry.sha256] = path.read_bytes()
        self.blobs.put([entry])

    def start(self, node: str, **factors: Seen) -> tuple[CompileCache, EngineSpec]:
        store = CompileStore(
            self.tmp / node, bytes_max=2**30, make_id=lambda: f"id{next(self.ids)}"
        )
        registry: Any = self.registry
        moves = Held(
            store,
            registry=registry,
            clock=SystemClock(),
            reader=Reader("w", "w-1", node),
            upload="http://r/v1/blobs/sha256",
            vouch=self.vouch,
        )
        moves.world = self
        cache = CompileCache(
            store,
            registry=registry,
            clock=SystemClock(),
            inspect=lambda _spec, _manifest: CompileFacts({**FACTS, **factors}),
            bytes_of=moves,
        )
        return cache, self.spec(f"work{next(self.ids)}")

    def spec(self, name: str, mode: StartMode = StartMode.JIT) -> EngineSpec:
        work = self.tmp / name
        work.mkdir()
        return EngineSpec(
            engine_id=name,
            role=Role.DECODE,
            model=MODEL.model,
            manifest_digest=MODEL.digest,
            arena_path=work,
            tensor_table_path=work,
            config_path=work,
            tokenizer_path=None,
            profile="p",
            work_dir=work,
            log_path=work / "log",
            mode=mode,
            compile_cache_dir=work / "cache",
        )

    async def life(self, node: str, **factors: Seen) -> tuple[CompileCache, EngineSpec, Outcome]:
        """One whole start: prepare, compile where it is needed, keep."""
        cache, spec = self.start(node, **factors)
        outcome = await cache.prepare(spec, MODEL)
        assert outcome is not None
        if not outcome.hit:
            compiled(spec)
        await cache.keep(MODEL)
        return cache, spec, outcome


def compiled(spec: EngineSpec) -> None:
    """What an engine leaves behind; no two compilations are alike."""
    assert spec.compile_cache_dir is not None
    folder = spec.compile_cache_dir / "inner"
    folder.mkdir(parents=True)
    (folder / "kernel").write_bytes(spec.engine_id.encode() * 1000)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    blobs, clock = MemoryBlobs(), SystemClock()
    registry = RegistryService(
        store=MemoryCatalog(),
        live=MemoryLive(clock, weight=0.3),
        blobs=blobs,
        clock=clock,
        make_id=lambda: "t",
    )
    found = World(tmp_path, registry, blobs)
    monkeypatch.setattr(compile_publish, "put", found.put)
    monkeypatch.setattr(compile_cache, "KEEP_PAUSE_S", 0.01)
    return found


def kernel(spec: EngineSpec) -> bytes:
    assert spec.compile_cache_dir is not None
    return (spec.compile_cache_dir / "inner" / "kernel").read_bytes()


async def test_the_first_compiles_the_others_take_what_it_published(world: World) -> None:
    first, made, outcome = await world.life("n1")
    assert str(outcome) == "compiled code miss: absent"
    assert first.counts == {("miss", "absent"): 1, ("published", "published"): 1}
    _, far, outcome = await world.life("n2")
    assert outcome.hit == "registry" and kernel(far) == kernel(made)
    for node in ("n1", "n2"):
        fetches = world.fetches
        _, near, outcome = await world.life(node)
        assert outcome.hit == "node" and kernel(near) == kernel(made)
        assert world.fetches == fetches


async def test_many_that_publish_one_key_agree_on_the_first(world: World) -> None:
    lives = await asyncio.gather(*(world.life(f"n{i}") for i in range(5)))
    told = sorted(what for cache, *_ in lives for name, what in cache.counts if name == "published")
    assert told == ["known"] * 4 + ["published"]
    (tag,) = await world.registry.list_tags()
    assert tag.name.startswith("compile/")
    later = [await world.life(f"later{i}") for i in range(2)]
    assert {outcome.hit for _, _, outcome in later} == {"registry"}
    assert len({kernel(spec) for _, spec, _ in later}) == 1


async def test_a_miss_names_what_differs_from_the_nearest(world: World) -> None:
    await world.life("n1", driver=known("1"), tp=known("8"))
    await world.life("n1", driver=known("560"))
    cache, _, outcome = await world.life("n2", driver=known("570"))
    assert (outcome.miss, outcome.factors) == ("differs", ("driver",))
    assert outcome.detail == "driver: 560 != 570"
    lines = cache.metrics('worker_id="w"')
    assert (
        'readyplane_compile_cache_miss_total{worker_id="w",reason="differs",factor="driver"} 1'
        in lines
    )
    _, _, outcome = await world.life("n3", **{"env.VLLM_NEW": known("1")})
    assert (outcome.miss, outcome.factors) == ("differs", ("driver", "environment"))


async def test_what_is_not_known_is_a_miss_with_its_name_and_nothing_is_published(
    world: World,
) -> None:
    cache, _, outcome = await world.life("n1", driver=unknown("nvidia-smi timed out"))
    assert (outcome.miss, outcome.factors) == ("unknown", ("driver",))
    assert outcome.detail == "driver: nvidia-smi timed out"
    assert cache.counts == {("miss", "unknown:driver"): 1}
    assert await world.registry.list_manifests(kind="compile") == []
    _, _, outcome = await world.life("n1", driver=unknown("nvidia-smi timed out"))
    assert outcome.miss == "unknown", "not even with itself"


async def test_an_eager_start_asks_for_nothing(world: World) -> None:
    cache, _ = world.start("n1")
    assert await cache.prepare(world.spec("eager", StartMode.EAGER), MODEL) is None
    await cache.keep(MODEL)
    assert cache.counts == {}


@pytest.mark.parametrize("error", [OSError("no /proc"), Unavailable("x", "y")])
async def test_nothing_that_goes_wrong_fails_a_start(world: World, error: Exception) -> None:
    cache, spec = world.start("n1")

    def broken(_spec: EngineSpec, _manifest: Manifest) -> CompileFacts:
        raise error

    cache._inspect = broken
    outcome = await cache.prepare(spec, MODEL)
    assert outcome is not None and outcome.miss == "unreadable"
    await cache.keep(MODEL)


async def test_what_takes_too_long_is_a_miss(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.life("n1")
    cache, spec = world.start("n2")

    async def hangs(manifest: Manifest) -> dict[str, bytes]:
        await asyncio.sleep(60)
        return {}

    monkeypatch.setattr(cache._bytes, "fetch", hangs)
    monkeypatch.setattr(compile_cache, "PREPARE_LIMIT_S", 0.1)
    outcome = await cache.prepare(spec, MODEL)
    assert outcome is not None and outcome.miss == "late"


async def test_a_registry_that_is_away_is_a_miss_and_the_node_keeps_the_code(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> Any:
        raise Unavailable("the registry is away", "wait")

    for name in ("resolve", "resolve_need", "set_tag"):
        monkeypatch.setattr(world.registry, name, away)
    cache, _, outcome = await world.life("n1")
    assert outcome.miss == "unreachable"
    assert cache.counts[("published", "failed")] == 1
    _, _, outcome = await world.life("n1")
    assert outcome.hit == "node"


async def test_what_nobody_trusted_has_signed_is_not_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.life("n1")

    async def untrusted(*_: Any, **__: Any) -> Any:
        raise Refused("trust in 'tiny'", ["no signature"])

    monkeypatch.setattr(world.registry, "resolve_need", untrusted)
    _, _, outcome = await world.life("n2")
    assert outcome.miss == "refused"
    assert "no signature" in outcome.detail
    monkeypatch.undo()
    monkeypatch.setattr(compile_publish, "put", world.put)
    world.untrusted = True  # by this worker's own policy, whatever the registry says
    _, _, outcome = await world.life("n3")
    assert outcome.miss == "refused"
    assert "no signature" in outcome.detail


def spoil(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {k: v[:-1] + bytes([v[-1] ^ 1]) if len(v) > 1 else v for k, v in files.items()}


async def test_what_is_not_as_it_says_is_withdrawn_and_replaced(world: World) -> None:
    await world.life("n1")
    good = dict(world.bytes_of)
    world.bytes_of = spoil(good)
    cache, _, outcome = await world.life("n2")
    assert outcome.miss == "corrupt"
    assert cache.counts[("refused", "corrupt")] == 1
    assert cache.counts[("published", "published")] == 1, "the tag moved on to what was compiled"
    _, _, outcome = await world.life("n3")
    assert outcome.hit == "registry"


async def test_code_on_which_an_engine_did_not_start_is_nobodys_any_more(world: World) -> None:
    await world.life("n1")
    for node in ("n2", "n1"):
        cache, spec = world.start(node)
        outcome = await cache.prepare(spec, MODEL)
        if node == "n2":
            assert outcome is not None and outcome.hit == "registry"
        await cache.failed()
    _, _, outcome = await world.life("n2")
    assert outcome.miss == "absent"


async def test_an_engine_that_fails_without_reused_code_withdraws_nothing(world: World) -> None:
    cache, spec = world.start("n1")
    await cache.failed()
    await cache.prepare(spec, MODEL)
    await cache.failed()
    assert await world.registry.list_tags() == []


async def test_a_hit_that_the_engine_does_not_take_is_counted(world: World) -> None:
    await world.life("n1")
    cache, spec = world.start("n1")
    await cache.prepare(spec, MODEL)
    cache.judge([Segment(SegmentName.COMPILE, 0.0, 1.0, detail="cache=miss:block_size")])
    assert cache.counts == {("hit", "node"): 1, ("refused", "engine"): 1}


async def test_an_engine_that_left_nothing_publishes_nothing(world: World) -> None:
    cache, spec = world.start("n1")
    await cache.prepare(spec, MODEL)
    await cache.keep(MODEL)
    await cache.keep(MODEL)
    assert cache.counts == {("miss", "absent"): 1, ("published", "failed"): 1}


def test_where_to_send_bytes_is_told_by_the_registrys_own_storage() -> None:
    def plan(url: str, worker_id: str = "") -> FetchPlan:
        source = Source("s", "sha256:1", WeightTier.L4_OBJECT, url, worker_id=worker_id)
        return FetchPlan((RankedSource(source, 1.0, ""),))

    url = "http://h:1/v1/blobs/sha256:1"
    assert upload_url(plan(url), "sha256:1") == "http://h:1/v1/blobs/sha256"
    assert upload_url(plan(url, "w1"), "sha256:1") == ""
    assert upload_url(plan("http://h:1/v1/chunks/sha256:1"), "sha256:1") == ""
    assert upload_url(FetchPlan(()), "sha256:1") == ""
