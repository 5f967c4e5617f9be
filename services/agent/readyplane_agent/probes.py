"""Evidence for the ready gate (R18.1): what was really loaded, and what the engine really answers.

Owns the measurements, one `CheckResult` a check by the names of `readyplane.core.gate_checks`; the
router's gate judges the values itself. A probe that cannot be made says so and does not pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from readyplane.core import gate_checks as gc
from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable, Unsupported
from readyplane.core.identity import Manifest, compatible, digest_of_bytes
from readyplane.core.profile import ClassProfile
from readyplane.core.safetensors import PREFIX_BYTES, header_bytes, tensors_of
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane.core.worker import CheckResult, Fleet, Role, Serving, Worker, WorkerState
from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena
from readyplane_agent.engines.exchange import EngineFailed
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.engines.port import EnginePort, GenerateResult

PROBE_LIMIT_S = 60.0
PEERS_MAX = 8
PEERS_TRIED_MAX = 2
PEER_ANSWER_S_MAX = 5.0
KV_EVENTS_WAIT_S = 3.0
KV_HASHES_MAX = 64
KV_SETTLE_S = 1.0
# Asked of an engine whose artifact records no question: any tokens that every vocabulary has.
PLAIN_PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)
PLAIN_TOKENS = 8
# KV that is wrong shows in the first tokens decoded from it.
HANDOVER_TOKENS = 4
# Two engines that meet for the first time may need longer than one gives the other (NIXL of vLLM: 5 s
# for an answer, on a busy processor it takes up to half a minute).
MEETING_TRIES = 4
P_LEG: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def loaded_checks(arena: Arena, *, tokenizer_digest: str, ranks: int) -> list[CheckResult]:
    """Checks of the bytes in a sealed arena: revision, tokenizer, checksums, coverage."""
    manifest = arena.manifest
    total = sum(len(entry.chunks) for entry in manifest.files)
    failed = [f"{path}[{index}]" for path, index in arena.missing()]
    missing = missing_tensors(arena, ranks=ranks)
    found = len(manifest.tensors) - len(missing)
    wanted = manifest.tokenizer_digest
    return [
        CheckResult(gc.MODEL_REVISION, True, {"manifest_digest": manifest.digest}),
        CheckResult(
            gc.TOKENIZER_REVISION,
            tokenizer_digest == wanted,
            {"tokenizer_digest": tokenizer_digest},
            "" if tokenizer_digest == wanted else f"loaded {tokenizer_digest}, manifest {wanted}",
        ),
        CheckResult(
            gc.TENSOR_CHECKSUMS,
            not failed and arena.sealed,
            {"chunks_verified": total - len(failed), "chunks_total": total, "failed": failed},
        ),
        CheckResult(
            gc.SHARD_COVERAGE,
            not missing,
            {
                "tensors": found,
                "tensors_expected": len(manifest.tensors),
                "missing": missing,
                "ranks": ranks,
                **arena.held_by_ranks(),
            },
        ),
    ]


def missing_tensors(arena: Arena, *, ranks: int) -> list[str]:
    """Tensors that are not where the manifest says, or that no rank of this group owns.

    The header of each safetensors file, as loaded, must name exactly the manifest's tensors of
    that file with the same dtype, shape and place (B128); other formats have no header to ask.
    Of several ranks the parts that each has in its memory must be every tensor, once.
    """
    wrong: set[str] = set()
    for tensor in arena.manifest.tensors:
        if tensor.ranks and not any(0 <= rank < ranks for rank in tensor.ranks):
            wrong.add(f"{tensor.name} (no rank of {ranks} owns it)")
    wrong.update(arena.uncovered())
    if arena.world != ranks:
        wrong.add(f"all tensors ({arena.world} ranks have memory, {ranks} are started)")
    for entry in arena.manifest.files:
        if not entry.path.endswith(".safetensors"):
            continue
        listed = {t.name: t for t in arena.manifest.tensors if t.file == entry.path}
        try:
            held = safetensors_table(
                arena.header(entry.path), file=entry.path, size_bytes=entry.size_bytes
            )
        except InvalidField as error:
            wrong.update(f"{name} ({error})" for name in listed)
            continue
        for name in held.keys() - listed.keys():
            wrong.add(f"{name} (in {entry.path}, not in the manifest)")
        for name, tensor in listed.items():
            is_so = (tensor.dtype, tensor.shape, tensor.offset_bytes, tensor.size_bytes)
            if held.get(name) != is_so:
                wrong.add(f"{name} ({entry.path} says {held.get(name)})")
    return sorted(wrong)


def safetensors_table(
    data: memoryview, *, file: str = "safetensors", size_bytes: int | None = None
) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """By name: (dtype, shape, offset in the file, size) of a safetensors file (B128, B133, B134).

    Args:
        data: the file, or its beginning. size_bytes: of the whole file, where that is less.

    Raises:
        InvalidField: names the file, and the tensor where it is one; see `core.safetensors`.
    """
    size_bytes = len(data) if size_bytes is None else size_bytes
    length = header_bytes(bytes(data[:PREFIX_BYTES]), size_bytes=size_bytes, file=file)
    header = bytes(data[PREFIX_BYTES : PREFIX_BYTES + length])
    return {
        t.name: (t.dtype, t.shape, t.offset_bytes, t.size_bytes)
        for t in tensors_of(header, size_bytes=size_bytes, file=file)
    }


def tokenizer_digest(arena: Arena) -> str:
    """Digest of the tokenizer files as loaded: their own bytes are hashed, not the manifest's word."""
    from readyplane.core.identity import digest_of

    found = [
        [entry.path, digest_of_bytes(arena.view(entry.path))]
        for entry in arena.manifest.files
        if entry.purpose == "tokenizer"
    ]
    return digest_of(found) if found else ""


def not_applicable(names: Iterable[str], why: str) -> list[CheckResult]:
    """Checks that nobody can make on an engine that was already running."""
    return [CheckResult(name, True, {gc.NOT_APPLICABLE: why}, why) for name in sorted(names)]


def profile_check(profile: ClassProfile) -> CheckResult:
    """The class profile, whole, so that a router that has it not can register it."""
    evidence = {
        "name": profile.name,
        "digest": profile.digest,
        "document": profile.document(),
    }
    return CheckResult(gc.PROFILE, True, evidence)


def lease_check(epoch: int) -> CheckResult:
    """The lease under which the worker came up."""
    return CheckResult(gc.LEASE, True, {"epoch": epoch})


def group_check(group_epoch: int) -> CheckResult:
    """The published epoch of the group."""
    return CheckResult(gc.GROUP, group_epoch > 0, {"group_epoch": group_epoch})


@dataclass(frozen=True, slots=True)
class Question:
    """What the canary asks, and the known answer (empty when nobody recorded one).

    `ends`: the known answer is known to end by itself (`canary_ends` of the manifest's config).
    """

    prompt: tuple[int, ...]
    golden: tuple[int, ...]
    eos_token_id: int | None
    ends: bool = False

    @classmethod
    def of(cls, manifest: Manifest | None) -> Question:
        """From the manifest's canary; a plain question where there is none."""
        eos = None if manifest is None else manifest.config.get("eos_token_id")
        eos_id = eos if isinstance(eos, int) else None
        if manifest is None or manifest.canary is None:
            return cls(PLAIN_PROMPT, (), eos_id)
        canary = manifest.canary
        ends = manifest.config.get("canary_ends") is True
        return cls(canary.prompt_token_ids, canary.golden_token_ids, eos_id, ends)

    @property
    def max_tokens(self) -> int:
        """As long as the known answer."""
        return len(self.golden) or PLAIN_TOKENS


async def ask(engine: EnginePort, question: Question) -> GenerateResult:
    """The first answer, computed cold. Raises Unavailable when the engine does not answer."""
    return await engine.generate(
        question.prompt, max_tokens=question.max_tokens, timeout_s=PROBE_LIMIT_S
    )


async def canary(
    engine: EnginePort, question: Question, first: GenerateResult
) -> list[CheckResult]:
    """Ask again, and ask with bounds: canary and basics of R18.1.

    The second answer uses the prefix cache, so that a cache that changes answers is seen, and
    greedy sampling must repeat itself.

    Raises:
        Unavailable: the engine does not answer.
    """
    prompt, size = question.prompt, question.max_tokens
    again, bounded, (stops, stop_detail) = await asyncio.gather(
        engine.generate(prompt, max_tokens=size, timeout_s=PROBE_LIMIT_S),
        engine.generate(prompt, max_tokens=2, ignore_eos=True, timeout_s=PROBE_LIMIT_S),
        _stops(engine, question, first),
    )
    right = not question.golden or first.token_ids == question.golden
    repeats = again.token_ids == first.token_ids
    bounds = len(bounded.token_ids) == 2 and bounded.finish_reason == "length"
    reasons = []
    if not right:
        reasons.append(f"answered {list(first.token_ids)}, golden {list(question.golden)}")
    if not repeats:
        reasons.append(f"answered {list(first.token_ids)}, asked again {list(again.token_ids)}")
    if not first.token_ids:
        reasons.append("no answer")
    told = f"max_tokens=2 gave {len(bounded.token_ids)} tokens, {bounded.finish_reason}"
    return [
        CheckResult(
            gc.CANARY,
            not reasons and stops,
            {
                "token_ids": list(first.token_ids),
                "repeat_token_ids": list(again.token_ids),
                "eos_ok": stops,
                "sampling_ok": repeats,
            },
            "; ".join([*reasons, *([] if stops else [stop_detail])]),
        ),
        CheckResult(
            gc.BASICS,
            stops and bounds,
            {
                "eos": stops,
                "max_tokens": bounds,
                "structured": gc.NOT_OFFERED,
                "detail": f"{stop_detail}; {told}",
            },
            "" if stops and bounds else f"{stop_detail}; {told}",
        ),
    ]


def canary_again(before: CheckResult, question: Question, now: GenerateResult) -> CheckResult:
    """The canary of a worker that was proved before, with what it answers now."""
    answered = list(now.token_ids)
    golden = list(question.golden) or list(before.evidence.get("token_ids", ()))
    right = answered == golden
    why = "" if right else f"answers {answered} by now, {golden} is known"
    return CheckResult(
        before.name, before.passed and right, {**before.evidence, "token_ids": answered}, why
    )


async def _stops(engine: EnginePort, question: Question, first: GenerateResult) -> tuple[bool, str]:
    """Whether the end-of-sequence token ends an answer and `ignore_eos` keeps it from doing so.

    Where the known answer ends by itself, more room must not make it longer, and ignoring EOS
    must. Where it does not end, EOS must not stand inside it.
    """
    eos = question.eos_token_id
    ended = first.finish_reason == "stop"
    if question.ends and not ended:
        return False, f"the known answer ends by itself, this one was cut ({first.finish_reason})"
    if not ended:
        inside = eos is not None and eos in first.token_ids
        return not inside, f"the answer was cut at {len(first.token_ids)} tokens without EOS inside"
    room = question.max_tokens + 4
    longer, ignored = await asyncio.gather(
        engine.generate(question.prompt, max_tokens=room, timeout_s=PROBE_LIMIT_S),
        engine.generate(question.prompt, max_tokens=room, ignore_eos=True, timeout_s=PROBE_LIMIT_S),
    )
    same = longer.token_ids == first.token_ids and longer.finish_reason == "stop"
    goes_on = len(ignored.token_ids) > len(first.token_ids)
    return same and goes_on, f"ends by itself after {len(first.token_ids)} tokens"


async def kv_pool(engine: EnginePort, serving: Serving, clock: Clock) -> CheckResult:
    """Size of the KV pool as the engine tells it, and what is free after the canary."""
    until_s = clock.monotonic_s() + KV_SETTLE_S
    while True:
        load = await engine.load_report()
        total, used = load.kv_total_blocks, load.kv_used_blocks
        free = None if total is None or used is None else total - used
        settled = free is not None and total is not None and free >= 0.95 * total
        if settled or clock.monotonic_s() > until_s:
            break
        await clock.sleep(0.1)
    right = settled and total == serving.kv_total_blocks
    return CheckResult(
        gc.KV_POOL,
        right,
        {"kv_total_blocks": total, "free_blocks": free},
        "" if right else f"engine says {total} blocks, {free} free; {serving.kv_total_blocks} told",
    )


async def kv_hashes(
    engine: EnginePort, question: Question, serving: Serving, *, wait_s: float = KV_EVENTS_WAIT_S
) -> CheckResult:
    """What the engine's KV events name a prompt's blocks, for the router to compare (B95).

    A prompt of its own, of two blocks where they fit: the canary's may be shorter than a block.
    """
    size = serving.block_size
    length = min(2 * size + 1, serving.max_model_len - 1)
    tokens = [t for t, _ in zip(cycle(question.prompt[::-1]), range(length), strict=False)]
    wanted = set(sequence_hashes(pack_tokens(tokens), size))
    told: list[str] = []
    why = f"no KV events within {wait_s:g} s: its prefixes are guessed"
    events = engine.kv_events()
    try:
        await engine.generate(tokens, max_tokens=1, timeout_s=PROBE_LIMIT_S)
        async with asyncio.timeout(wait_s):
            async for batch in events:
                stored = [h for e in batch.events if e.kind == "stored" for h in e.block_hashes]
                wanted -= set(stored)
                told = [*told, *map(str, stored)][-KV_HASHES_MAX:]
                if not wanted:
                    break
    except TimeoutError:
        pass
    except ReadyplaneError as error:
        why = str(error)
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    if told:
        why = (
            "hash_mismatch: it names a prompt's blocks otherwise than the router" if wanted else ""
        )
    evidence = {"token_ids": tokens, "block_size": size, "told": told}
    return CheckResult(gc.KV_HASHES, not wanted or not told, evidence, why)


def no_kv_hashes(serving: Serving, why: str) -> CheckResult:
    """The engine's KV events are followed by nobody."""
    evidence = {"token_ids": [], "block_size": serving.block_size, "told": []}
    return CheckResult(gc.KV_HASHES, True, evidence, why)


def peers_for(fleet: Fleet, *, worker_id: str, role: Role, serving: Serving) -> list[Worker]:
    """Ready workers of the other stage whose KV fits ours, the idlest first.

    Who serves both is given KV by prefill workers; from those that only decode nothing comes.
    """
    found = [
        worker
        for worker in fleet.workers.values()
        if worker.worker_id != worker_id
        and worker.state is WorkerState.READY
        and worker.serving is not None
        and worker.role is not role
        and not (role is Role.BOTH and worker.role is Role.DECODE)
        and not compatible(worker.serving.kv, serving.kv)
    ]
    return sorted(found, key=lambda w: (w.active, w.worker_id))[:PEERS_MAX]


async def answering(
    peers: Sequence[tuple[str, OpenAiEngine]], *, limit_s: float = PEER_ANSWER_S_MAX
) -> tuple[list[tuple[str, OpenAiEngine]], list[str]]:
    """The first `PEERS_TRIED_MAX` peers that answer at all, and what is to be noted of the others.

    A frozen peer takes connections and answers nothing: a hand-over with it would take its whole
    bound, longer than a start is given.
    """

    async def look(peer: OpenAiEngine) -> str:
        try:
            async with asyncio.timeout(limit_s):
                await peer.get("/health", timeout_s=limit_s)
        except TimeoutError:
            return f"no answer within {limit_s:g} s"
        except Unavailable as error:
            return str(error)
        except ReadyplaneError:  # it has no such page, and it has answered
            pass
        return ""

    said = await asyncio.gather(*(look(peer) for _, peer in peers))
    good = [peer for peer, why in zip(peers, said, strict=True) if not why]
    notes = [
        f"{worker_id}: not reached ({why})"
        for (worker_id, _), why in zip(peers, said, strict=True)
        if why
    ]
    return good[:PEERS_TRIED_MAX], notes


async def kv_connector(
    engine: EnginePort,
    question: Question,
    expected: Sequence[int],
    peers: Sequence[tuple[str, OpenAiEngine]],
    *,
    itself: bool = True,
) -> CheckResult:
    """Hand KV over, to ourselves and with a peer in both directions, and compare the answers.

    Args:
        expected: the answer computed without a hand-over. peers: (worker id, its engine).
        itself: the engine can read its own KV; else a peer has to prove both directions.

    An unreachable peer is its own affair and only noted; one that is reached and refuses, or
    answers otherwise, speaks against this worker.
    """
    alone = asyncio.create_task(_handover(engine, engine, question, expected)) if itself else None
    outward = homeward = itself
    peers, told = await answering(peers)
    tries = 1 if itself else MEETING_TRIES
    for worker_id, peer in peers:
        (out, note_out), (back, note_back) = await asyncio.gather(
            _handover(engine, peer, question, expected, tries=tries),
            _handover(peer, engine, question, expected, tries=tries),
        )
        told.append(f"to {worker_id}: {note_out}; from {worker_id}: {note_back}")
        if out is None or back is None:
            continue
        if not (out and back) and not await _answers(peer, question):
            told.append(f"{worker_id} has gone meanwhile")
            continue
        outward, homeward = out, back
        break
    own, note = (True, "reads no KV of its own") if alone is None else await alone
    outbound, inbound = own is True and outward, own is True and homeward
    notes = [f"self: {note}", *told]
    detail = "; ".join(notes)
    return CheckResult(
        gc.KV_CONNECTOR,
        outbound and inbound,
        {"outbound": outbound, "inbound": inbound, "detail": detail},
        "" if outbound and inbound else detail,
    )


async def _answers(peer: OpenAiEngine, question: Question) -> bool:
    """Whether a peer still answers at all."""
    try:
        await peer.generate(question.prompt, max_tokens=1, timeout_s=PROBE_LIMIT_S)
    except ReadyplaneError:
        return False
    return True


async def _handover(
    giver: EnginePort | OpenAiEngine,
    taker: EnginePort | OpenAiEngine,
    question: Question,
    expected: Sequence[int],
    *,
    tries: int = 1,
) -> tuple[bool | None, str]:
    """One P leg and one D leg; None when an end could not be reached.

    An end that is reached and fails at the D leg could not read the KV: that is an answer, to the
    last of `tries`. A wrong answer is never asked again.
    """
    wanted = list(expected[:HANDOVER_TOKENS])
    failed: list[str] = []
    try:
        while len(failed) < tries:
            leg = await giver.generate(
                question.prompt, max_tokens=1, kv_transfer_params=P_LEG, timeout_s=PROBE_LIMIT_S
            )
            if not leg.kv_transfer_params:
                return False, "the prefill leg gave no kv_transfer_params"
            try:
                answer = await taker.generate(
                    question.prompt,
                    max_tokens=min(HANDOVER_TOKENS, question.max_tokens),
                    kv_transfer_params=leg.kv_transfer_params,
                    timeout_s=PROBE_LIMIT_S,
                )
            except EngineFailed as error:
                failed.append(f"failed ({error})")
                continue
            if list(answer.token_ids) != wanted:
                return False, f"answered {list(answer.token_ids)} instead of {wanted}"
            return True, f"ok at try {len(failed) + 1}, {failed[0]}" if failed else "ok"
    except Unavailable as error:
        return None, f"not reached ({error})"
    except (InvalidField, Unsupported) as error:
        return False, f"refused ({error})"
    except ReadyplaneError as error:
        return False, str(error)
    return False, failed[-1]
