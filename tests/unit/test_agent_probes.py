"""Evidence for the gate: what a probe measures, and that it cannot be fooled (R18.1)."""

import asyncio
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core import gate_checks as gc
from readyplane.core.errors import InvalidField, Unavailable
from readyplane.core.identity import KvFormat, Manifest, TensorEntry
from readyplane.core.worker import Fleet, LoadReport, Role, Serving, WorkerOffer, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane_agent import probes
from readyplane_agent.arena import Arena
from readyplane_agent.engines.exchange import EngineFailed
from readyplane_agent.engines.port import GenerateResult
from readyplane_agent.probes import Question
from tests.unit.agent_twins import Artifact, TwinEngine, artifact, ready_worker

GOLDEN = (7, 8, 9, 2)
QUESTION = Question((5, 6, 7), GOLDEN, 2)
SERVING = Serving("http://127.0.0.1:1", KvFormat("sha256:x"), 100, 16, 4096, "h200-slow10")


def loaded(art: Artifact, manifest: Manifest | None = None) -> Arena:
    arena = Arena(manifest or art.manifest)
    for path, data in art.files.items():
        entry = arena.entry(path)
        assert entry is not None
        for index in range(len(entry.chunks)):
            start, size = arena.span(path, index)
            with arena.window(path, index) as window:
                window[:] = data[start : start + size]
            arena.mark(path, index)
    arena.seal()
    return arena


# --------------------------------------------------------------------------- loaded bytes


def test_a_good_load_passes_with_its_evidence() -> None:
    art = artifact()
    arena = loaded(art)
    digest = probes.tokenizer_digest(arena)
    assert digest == art.manifest.tokenizer_digest
    checks = {c.name: c for c in probes.loaded_checks(arena, tokenizer_digest=digest, ranks=1)}
    assert all(c.passed for c in checks.values())
    total = sum(len(f.chunks) for f in art.manifest.files)
    assert checks[gc.TENSOR_CHECKSUMS].evidence["chunks_verified"] == total
    assert checks[gc.SHARD_COVERAGE].evidence["tensors"] == len(art.manifest.tensors)


def test_another_tokenizer_does_not_pass() -> None:
    arena = loaded(artifact())
    checks = {c.name: c for c in probes.loaded_checks(arena, tokenizer_digest="sha256:y", ranks=1)}
    assert not checks[gc.TOKENIZER_REVISION].passed


@pytest.mark.parametrize(
    "change",
    [
        lambda t: replace(t, dtype="I32"),
        lambda t: replace(t, shape=(25_000, 2)),
        lambda t: replace(t, offset_bytes=t.offset_bytes + 4),
        lambda t: replace(t, name="layer.0.renamed"),
        lambda t: replace(t, ranks=(3,)),
    ],
)
def test_a_manifest_that_does_not_fit_the_file_is_seen(change: Any) -> None:
    """B128: the header in the loaded bytes and the manifest must say the same."""
    art = artifact()
    first: TensorEntry = art.manifest.tensors[0]
    others = art.manifest.tensors[1:]
    manifest = replace(art.manifest, tensors=(change(first), *others))
    arena = loaded(art, manifest)
    wrong = probes.missing_tensors(arena, ranks=1)
    assert wrong and "layer.0" in wrong[0]


def test_a_tensor_too_many_in_the_file_is_seen() -> None:
    art = artifact()
    manifest = replace(art.manifest, tensors=art.manifest.tensors[1:])
    (wrong,) = probes.missing_tensors(loaded(art, manifest), ranks=1)
    assert "not in the manifest" in wrong


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_any_header_is_read_or_refused(tail: bytes, length: int) -> None:
    data = memoryview(struct.pack("<Q", length) + tail)
    try:
        table = probes.safetensors_table(data)
    except InvalidField:
        return
    assert all(start + size <= len(data) for _, _, start, size in table.values())


@pytest.mark.parametrize("offsets", [[0, 999], [8, 4], [-4, 4], [0], "0-4", None])
def test_offsets_outside_the_file_are_refused(offsets: Any) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(8)
    with pytest.raises(InvalidField):
        probes.safetensors_table(memoryview(data))


# --------------------------------------------------------------------------- canary


async def asked(engine: TwinEngine, question: Question = QUESTION) -> dict[str, Any]:
    first = await probes.ask(engine, question)
    return {c.name: c for c in await probes.canary(engine, question, first)}


async def test_the_known_answer_passes() -> None:
    checks = await asked(TwinEngine(GOLDEN))
    assert checks[gc.CANARY].passed and checks[gc.BASICS].passed
    assert checks[gc.CANARY].evidence["token_ids"] == list(GOLDEN)
    assert "ends by itself after 4 tokens" in checks[gc.BASICS].evidence["detail"]


async def test_an_answer_without_its_end_is_taken_as_cut() -> None:
    checks = await asked(TwinEngine((7, 8, 9, 10, 11, 12)), Question((5,), (7, 8, 9, 10), 2))
    assert checks[gc.CANARY].passed
    assert "cut at 4 tokens" in checks[gc.BASICS].evidence["detail"]


class Odd(TwinEngine):
    """An engine with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__(GOLDEN)
        self.fault, self.calls = fault, 0

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> GenerateResult:
        self.calls += 1
        found = await super().generate(
            prompt_token_ids,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            kv_transfer_params=kv_transfer_params,
        )
        if self.fault == "forgets" and self.calls > 1 and max_tokens == 4:
            return replace(found, token_ids=(1, 1, 1, 2))
        if self.fault == "runs on" and not ignore_eos:
            tokens = (*GOLDEN, 5, 5, 5, 5)[:max_tokens]
            return replace(found, token_ids=tokens, finish_reason="length")
        if self.fault == "never bounds" and max_tokens == 2:
            return replace(found, token_ids=(7, 8, 9))
        if self.fault == "ignores ignore_eos" and ignore_eos and max_tokens > 2:
            return replace(found, token_ids=GOLDEN, finish_reason="stop")
        if self.fault == "silent":
            return replace(found, token_ids=())
        if self.fault == "no params" and kv_transfer_params is not None:
            return replace(found, kv_transfer_params=None)
        if self.fault == "taints" and kv_transfer_params is not None and max_tokens > 1:
            return replace(found, token_ids=(9, 9, 9, 9))
        if self.fault == "refuses" and kv_transfer_params is not None:
            raise InvalidField("kv_transfer_params", {}, "send other ones")
        if self.fault == "away" and kv_transfer_params is not None:
            raise Unavailable("nobody there", "wait")
        return found


@pytest.mark.parametrize(
    "fault, failed",
    [
        ("forgets", {gc.CANARY}),
        ("runs on", {gc.CANARY, gc.BASICS}),
        ("never bounds", {gc.BASICS}),
        ("ignores ignore_eos", {gc.CANARY, gc.BASICS}),
        ("silent", {gc.CANARY, gc.BASICS}),
    ],
)
async def test_each_fault_fails_its_check(fault: str, failed: set[str]) -> None:
    checks = await asked(Odd(fault))
    assert {name for name, check in checks.items() if not check.passed} == failed
    assert all(checks[name].reason for name in failed)


# --------------------------------------------------------------------------- hand-over


async def connector(engine: TwinEngine, *peers: TwinEngine) -> Any:
    named: Any = [(f"w{n}", peer) for n, peer in enumerate(peers)]
    return await probes.kv_connector(engine, QUESTION, GOLDEN, named)


async def test_a_hand_over_to_itself_and_with_a_peer() -> None:
    check = await connector(TwinEngine(GOLDEN), TwinEngine(GOLDEN))
    assert check.passed
    assert check.evidence["detail"] == "self: ok; to w0: ok; from w0: ok"


@pytest.mark.parametrize("fault", ["no params", "taints", "refuses"])
async def test_a_connector_that_does_not_work_is_seen(fault: str) -> None:
    check = await connector(Odd(fault))
    assert not check.passed
    assert check.evidence["outbound"] is False and check.reason


async def test_an_unreachable_peer_is_its_own_affair_the_next_one_counts() -> None:
    check = await connector(TwinEngine(GOLDEN), Odd("away"), TwinEngine(GOLDEN))
    assert check.passed
    assert "not reached" in check.evidence["detail"] and "to w1: ok" in check.evidence["detail"]


async def test_a_frozen_peer_is_named_and_costs_seconds_and_the_next_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes connections and answers nothing: no hand-over is begun with it."""

    class Frozen(TwinEngine):
        async def get(self, target: str, *, timeout_s: float = 10.0) -> bytes:
            await asyncio.sleep(3600)
            return b""

        async def generate(self, *_: Any, **__: Any) -> GenerateResult:
            await asyncio.sleep(3600)
            raise AssertionError

    limited = partial(probes.answering, limit_s=0.2)
    monkeypatch.setattr(probes, "answering", limited)
    async with asyncio.timeout(10):
        check = await connector(
            TwinEngine(GOLDEN), Frozen(GOLDEN), Frozen(GOLDEN), TwinEngine(GOLDEN)
        )
        alone = await connector(TwinEngine(GOLDEN), Frozen(GOLDEN))
    assert check.passed and alone.passed
    told = check.evidence["detail"]
    assert "w0: not reached (no answer within 0.2 s)" in told and "to w2: ok" in told
    assert "w0: not reached" in alone.evidence["detail"]


async def test_a_peer_that_answers_otherwise_speaks_against_this_worker() -> None:
    check = await connector(TwinEngine(GOLDEN), Odd("taints"))
    assert not check.passed
    assert check.evidence["outbound"] is False and check.evidence["inbound"] is True


async def test_an_engine_that_cannot_read_its_own_kv_is_proved_by_a_peer_or_not_at_all() -> None:
    async def by(*peers: TwinEngine) -> Any:
        named: Any = [(f"w{n}", peer) for n, peer in enumerate(peers)]
        return await probes.kv_connector(TwinEngine(GOLDEN), QUESTION, GOLDEN, named, itself=False)

    good = await by(TwinEngine(GOLDEN))
    assert good.passed
    assert good.evidence["detail"] == "self: reads no KV of its own; to w0: ok; from w0: ok"
    for check in (await by(), await by(Odd("away")), await by(Odd("taints"))):
        assert not check.passed
        assert check.evidence["outbound"] is False

    class Meeting(TwinEngine):
        """Fails so often before it has met the other one."""

        failures = probes.MEETING_TRIES - 1

        async def generate(self, *args: Any, **more: Any) -> GenerateResult:
            if more.get("kv_transfer_params") not in (None, probes.P_LEG) and self.failures:
                self.failures -= 1
                raise EngineFailed("the first meeting takes too long", "again")
            return await super().generate(*args, **more)

    check = await by(Meeting(GOLDEN))
    assert check.passed and f"ok at try {probes.MEETING_TRIES}" in check.evidence["detail"]
    Meeting.failures = probes.MEETING_TRIES
    assert not (await by(Meeting(GOLDEN))).passed


def test_peers_are_ready_of_the_other_stage_and_fit() -> None:
    def worker(name: str, role: Role, **more: Any) -> Any:
        offer = WorkerOffer(name, f"{name}-i", role, "m", "c")
        return replace(ready_worker(offer, SERVING), **more)

    other = replace(SERVING, kv=replace(SERVING.kv, block_size=32))
    everyone = [
        worker("me", Role.DECODE),
        worker("p", Role.PREFILL),
        worker("d", Role.DECODE),
        worker("busy", Role.PREFILL, active=5),
        worker("starting", Role.PREFILL, state=WorkerState.PROVISIONED),
        worker("unfit", Role.PREFILL, serving=other),
    ]
    fleet = Fleet(1, {w.worker_id: w for w in everyone})
    found = probes.peers_for(fleet, worker_id="me", role=Role.DECODE, serving=SERVING)
    assert [w.worker_id for w in found] == ["p", "busy"]


# --------------------------------------------------------------------------- KV pool


class Pool(TwinEngine):
    def __init__(self, *loads: LoadReport) -> None:
        super().__init__(GOLDEN)
        self.loads = list(loads)

    async def load_report(self) -> LoadReport:
        return self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]


async def test_the_pool_is_read_until_the_canary_is_gone() -> None:
    held = LoadReport(kv_used_blocks=50, kv_total_blocks=100)
    free = LoadReport(kv_used_blocks=0, kv_total_blocks=100)
    check = await probes.kv_pool(Pool(held, free), SERVING, SystemClock())
    assert check.passed and check.evidence == {"kv_total_blocks": 100, "free_blocks": 100}


@pytest.mark.parametrize(
    "load",
    [
        LoadReport(),  # unknown is not zero, and does not pass
        LoadReport(kv_used_blocks=0, kv_total_blocks=90),
        LoadReport(kv_used_blocks=60, kv_total_blocks=100),
    ],
)
async def test_a_pool_that_is_not_as_told_does_not_pass(
    load: LoadReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "KV_SETTLE_S", 0.05)
    check = await probes.kv_pool(Pool(load), SERVING, SystemClock())
    assert not check.passed and check.reason
