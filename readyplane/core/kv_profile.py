"""A measured KV-cache size, and whether a start may use it instead of measuring again (R16). Pure.

Owns the fingerprint under which a size holds, the account of the device's memory behind it, and the
verdict. A size is reused only where everything it depends on is the same and the memory is free
now; every reason against it is told. What failed once under a fingerprint is never tried again
unchanged. Handed to the agent, which measures, publishes and withdraws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from readyplane.core.canonical import canonical, digest_of, parse
from readyplane.core.compile_key import CompileKey, Seen, differences
from readyplane.core.errors import InvalidField

SCHEMA = "readyplane/kv-profile/1"
FILE, LAYOUT = "kv-profile.json", "kv-profile/1"
# Other processes' memory counts in steps, since a driver's own share wavers by some MiB.
CO_TENANT_STEP_BYTES = 256 * 2**20
HEADROOM_SHARE = 0.02
HEADROOM_SPREADS = 3
BLOCKS_TOLERANCE = 1
REASONS_MAX = 20


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What a size depends on beyond generated code; None where it could not be found out.

    Attributes:
        device_total_bytes: memory of the device, or of its MIG instance.
        co_tenant_bytes: what other processes hold there. co_tenants: how many they are.
        container_limit_bytes: of this container's host memory; 0: no limit.
        memory_share: part of the device that an engine may fill, 0 to 1.
        graph_sizes, mm_limits, lora, encoder: as the engine is told; `none` without.
        block_size: tokens of a KV block. max_batch_tokens, max_num_seqs: of an iteration.
    """

    device_total_bytes: int | None
    co_tenant_bytes: int | None
    co_tenants: int | None
    container_limit_bytes: int | None
    memory_share: float | None
    block_size: int | None
    max_batch_tokens: int | None
    max_num_seqs: int | None
    graph_sizes: str | None = "engine default"
    mm_limits: str | None = "none"
    lora: str | None = "none"
    encoder: str | None = "none"


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Where a device's memory goes, bytes; each part once (B140).

    Attributes:
        weights: of the model. activations: peak of a full iteration. graphs: captured graphs.
        other: what the framework and the driver hold. kv: the pool.
    """

    weights: int
    activations: int
    graphs: int
    other: int
    kv: int

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return self.weights + self.activations + self.graphs + self.other + self.kv


@dataclass(frozen=True, slots=True)
class KvProfile:
    """A measured size and everything it holds under.

    Attributes:
        fingerprint: name -> text, see `fingerprint_of`. parts: the account of the memory.
        device_total_bytes, co_tenant_bytes: as measured.
        block_bytes: of one block on one rank. block_size: its tokens. blocks: how many fit.
        spread_bytes: between the largest and the smallest peak of several measurements.
    """

    fingerprint: Mapping[str, str]
    parts: MemoryParts
    device_total_bytes: int
    co_tenant_bytes: int
    block_bytes: int
    block_size: int
    blocks: int
    spread_bytes: int = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit: what every share of KV in use is a share of (B143)."""
        return self.blocks * self.block_size

    @property
    def plan_digest(self) -> str:
        """Identity of using this size under this fingerprint."""
        return digest_of({"fingerprint": dict(self.fingerprint), "kv_bytes": self.parts.kv})

    @property
    def headroom_bytes(self) -> int:
        """What has to stay free beside the pool: 2 % of the device, or three times the spread."""
        share = int(self.device_total_bytes * HEADROOM_SHARE)
        return max(share, HEADROOM_SPREADS * self.spread_bytes)

    def document(self) -> dict[str, Any]:
        """The JSON document that is published."""
        told = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = {f.name: getattr(self.parts, f.name) for f in fields(self.parts)}
        return {"schema": SCHEMA, **told, "fingerprint": dict(self.fingerprint), "parts": parts}

    def encoded(self) -> bytes:
        """Canonical JSON."""
        return canonical(self.document())


@dataclass(frozen=True, slots=True)
class Reuse:
    """The size may be used: so many bytes and blocks, and what has to stay free."""

    kv_bytes: int
    blocks: int
    headroom_bytes: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The engine has to measure; every reason, each beginning with a word for a metric."""

    reasons: tuple[str, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The words, each once: `fingerprint_mismatch`, `unknown`, `memory`, `wrong`, `failed`."""
        return tuple(dict.fromkeys(reason.partition(":")[0] for reason in self.reasons))


def fingerprint_of(key: CompileKey, facts: MemoryFacts) -> tuple[dict[str, str], dict[str, str]]:
    """(fingerprint, problems): the compile key's factors and what else a size depends on.

    What could not be found out is a problem; a fingerprint with one meets none and is not kept.
    """
    found, problems = dict(key.factors), dict(key.problems)
    for field in fields(facts):
        value = getattr(facts, field.name)
        name = f"kv.{field.name}"
        if value is None:
            problems[name] = "not known"
        elif field.name == "co_tenant_bytes":
            found[name] = str(round(value / CO_TENANT_STEP_BYTES) * CO_TENANT_STEP_BYTES)
        else:
            found[name] = str(value)
    return dict(sorted(found.items())), dict(sorted(problems.items()))


def may_reuse(
    profile: KvProfile,
    key: CompileKey,
    facts: MemoryFacts,
    *,
    free_bytes_now: Seen,
    loaded: bool,
    failed: frozenset[str] = frozenset(),
) -> Reuse | Refuse:
    """Whether this start may take the size.

    Args:
        free_bytes_now: free on the device, as a whole number in text; not known refuses.
        loaded: weights and graphs are on the device already, so that only the pool must fit.
        failed: plan digests that did not work out before.
    """
    wanted, problems = fingerprint_of(key, facts)
    reasons = [f"unknown: {name}: {why}" for name, why in problems.items()]
    reasons += [
        f"fingerprint_mismatch: {d.field}: needed {d.left}, has {d.right}"
        for d in differences(wanted, profile.fingerprint)
        if d.field not in problems
    ]
    reasons += [f"wrong: {fault}" for fault in faults_of(profile)]
    if profile.plan_digest in failed:
        reasons.append("failed: this plan failed before; measure afresh")
    reasons += _memory_reasons(profile, free_bytes_now, loaded=loaded)
    if reasons:
        return Refuse(tuple(reasons[:REASONS_MAX]))
    return Reuse(profile.parts.kv, profile.blocks, profile.headroom_bytes)


def _memory_reasons(profile: KvProfile, free: Seen, *, loaded: bool) -> list[str]:
    if free.value is None or not free.value.isdigit():
        return [f"unknown: free memory: {free.problem or free.value or 'nobody told'}"]
    needed = profile.parts.kv if loaded else profile.parts.total_bytes
    needed += profile.headroom_bytes
    if int(free.value) < needed:
        return [f"memory: needs {needed} B with headroom, {free.value} B are free"]
    return []


def faults_of(profile: KvProfile) -> tuple[str, ...]:
    """What cannot be true of a profile; empty when its account adds up."""
    found = []
    numbers = {f.name: getattr(profile.parts, f.name) for f in fields(profile.parts)}
    numbers |= {"spread": profile.spread_bytes, "co-tenants": profile.co_tenant_bytes}
    found += [f"{name} of {value} B" for name, value in numbers.items() if value < 0]
    if profile.block_bytes < 1 or profile.block_size < 1 or profile.blocks < 1:
        return (*found, f"{profile.blocks} blocks of {profile.block_bytes} B")
    fit = profile.parts.kv // profile.block_bytes
    if abs(fit - profile.blocks) > BLOCKS_TOLERANCE:
        found.append(f"{profile.parts.kv} B hold {fit} blocks, it says {profile.blocks}")
    taken = profile.parts.total_bytes + profile.co_tenant_bytes
    if taken > profile.device_total_bytes:
        found.append(f"parts of {taken} B on a device of {profile.device_total_bytes} B")
    return tuple(found)


def measured(
    fingerprint: Mapping[str, str],
    *,
    device_total_bytes: int,
    memory_share: float,
    co_tenant_bytes: int,
    block_bytes: int,
    block_size: int,
    weights: int,
    activations: int,
    graphs: int,
    other: int,
    spread_bytes: int = 0,
) -> KvProfile:
    """The profile that one measurement gives: the pool is what every other part leaves.

    Raises:
        InvalidField: nothing is left for the pool.
    """
    may_fill = int(device_total_bytes * memory_share)
    left = may_fill - co_tenant_bytes - weights - activations - graphs - other
    blocks = left // block_bytes if block_bytes > 0 else 0
    if blocks < 1:
        raise InvalidField("kv_bytes", left, "leave room for one block: fewer tokens or sequences")
    parts = MemoryParts(weights, activations, graphs, other, blocks * block_bytes)
    return KvProfile(
        fingerprint=dict(fingerprint),
        parts=parts,
        device_total_bytes=device_total_bytes,
        co_tenant_bytes=co_tenant_bytes,
        block_bytes=block_bytes,
        block_size=block_size,
        blocks=blocks,
        spread_bytes=spread_bytes,
    )


def group_profile(ranks: Sequence[KvProfile]) -> KvProfile | Refuse:
    """One profile for all ranks: the fewest blocks, since every rank holds the same ones (B141).

    Ranks may differ in `rank` and in what they have measured, in nothing else of the fingerprint.
    """
    if not ranks:
        return Refuse(("unknown: no rank has measured",))
    smallest = min(ranks, key=lambda profile: profile.blocks)
    reasons = [
        f"fingerprint_mismatch: rank {number}: {difference}"
        for number, profile in enumerate(ranks)
        for difference in differences(smallest.fingerprint, profile.fingerprint)
        if difference.field != "rank"
    ]
    reasons += [f"wrong: rank {n}: {why}" for n, p in enumerate(ranks) for why in faults_of(p)]
    if reasons:
        return Refuse(tuple(reasons[:REASONS_MAX]))
    spread = max(profile.spread_bytes for profile in ranks)
    return replace(smallest, spread_bytes=spread)


def kv_profile_from(data: bytes | str) -> KvProfile:
    """Read a published profile, strictly.

    Raises:
        InvalidField: not such a document; the field is named.
    """
    doc = parse(data, where="kv_profile")
    if not isinstance(doc, dict) or doc.get("schema") != SCHEMA:
        raise InvalidField("kv_profile.schema", str(doc)[:60], f"write {SCHEMA}")
    parts, fingerprint = doc.get("parts"), doc.get("fingerprint")
    if not isinstance(parts, dict) or not isinstance(fingerprint, dict):
        raise InvalidField("kv_profile", str(doc)[:60], "give parts and fingerprint")
    if not all(isinstance(v, str) for v in fingerprint.values()):
        raise InvalidField("kv_profile.fingerprint", "", "give texts by name")
    part_names = [f.name for f in fields(MemoryParts)]
    names = [f.name for f in fields(KvProfile) if f.name not in {"fingerprint", "parts"}]
    return KvProfile(
        fingerprint=fingerprint,
        parts=MemoryParts(**{name: _whole(parts, name) for name in part_names}),
        **{name: _whole(doc, name) for name in names},
    )


def _whole(doc: Mapping[str, Any], name: str) -> int:
    value = doc.get(name)
    if type(value) is not int or not 0 <= value < 2**60:
        raise InvalidField(f"kv_profile.{name}", value, "give a whole number from 0")
    return value
