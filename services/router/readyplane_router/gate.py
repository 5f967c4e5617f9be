"""The ready gate: may this worker join the candidates? (R18)

Owns the judgement of evidence, one function a check; hands a `Verdict` to the service. An open
port is not readiness, and `passed=True` is a claim: each check compares the values it was sent with
what the manifest, the lease and the group say. Every reason is listed, not only the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from readyplane.core import gate_checks as gc
from readyplane.core.errors import InvalidField
from readyplane.core.identity import NO_CONNECTOR, Manifest
from readyplane.core.profile import ClassProfile
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane.core.worker import CheckResult, Role, Serving, WorkerOffer

# Blocks an engine keeps for itself (vLLM: one null block) and what the canary may still hold.
FREE_BLOCKS_SHARE_MIN = 0.95


@dataclass(frozen=True, slots=True)
class Expectations:
    """What the evidence is compared with.

    Attributes:
        offer: what the worker registered as. manifest: what it was told to serve, None when it
            is not known (attached engines).
        epoch, lease_valid, lease_why: its lease now.
        group_state, group_epoch: its group now.
        profiles: digest of each registered class profile, by name.
        allow_attached: policy; checks nobody can make may be skipped.
        hash_schemes: block-hash schemes the prefix index understands.
        generation_min: oldest generation of this model still wanted (0: any).
    """

    offer: WorkerOffer
    manifest: Manifest | None
    epoch: int
    lease_valid: bool
    group_state: str
    group_epoch: int
    profiles: Mapping[str, str]
    lease_why: str = ""
    allow_attached: bool = False
    hash_schemes: frozenset[str] = frozenset({"xxh3-1337"})
    generation_min: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """Every check holds; `checks` as judged."""

    checks: tuple[CheckResult, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Not admitted, with every reason; `checks` as judged."""

    reasons: tuple[str, ...]
    checks: tuple[CheckResult, ...]


@dataclass(frozen=True, slots=True)
class _Case:
    serving: Serving
    evidence: Mapping[str, Any]
    want: Expectations
    skipped: bool = False


_Judge = Callable[[_Case], list[str]]


@dataclass(slots=True)
class _Tally:
    reasons: list[str] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)


def judge(serving: Serving, checks: Sequence[CheckResult], want: Expectations) -> Admit | Refuse:
    """Judge all evidence.

    Args:
        serving: how the worker says it can be reached and what it holds.
        checks: evidence, at most one result a check.
        want: what it must agree with.
    """
    tally = _Tally()
    by_name: dict[str, CheckResult] = {}
    for check in checks:
        if check.name in by_name:
            tally.reasons.append(f"{check.name}: sent twice")
        by_name[check.name] = check
    for name, fields in gc.GATE_CHECKS.items():
        _one(name, fields, by_name.pop(name, None), serving, want, tally)
    for name, extra in by_name.items():
        if not extra.passed:
            tally.reasons.append(f"{name}: {extra.reason or 'failed'}")
        tally.checks.append(extra)
    tally.reasons.extend(_serving_reasons(serving, want))
    if want.offer.generation < want.generation_min:
        tally.reasons.append(
            f"generation {want.offer.generation} is over: {want.generation_min} is the oldest wanted"
        )
    if tally.reasons:
        return Refuse(tuple(tally.reasons), tuple(tally.checks))
    return Admit(tuple(tally.checks))


def _one(
    name: str,
    fields: tuple[str, ...],
    check: CheckResult | None,
    serving: Serving,
    want: Expectations,
    tally: _Tally,
) -> None:
    if check is None:
        why = f"{name}: this check was not made"
        tally.reasons.append(why)
        tally.checks.append(CheckResult(name, passed=False, reason="this check was not made"))
        return
    reasons = [] if check.passed else [check.reason or "failed, without saying why"]
    skip = check.evidence.get(gc.NOT_APPLICABLE)
    if skip is not None:
        reasons.extend(_skip_reasons(name, want))
    else:
        missing = [f for f in fields if f not in check.evidence]
        if missing:
            reasons.append(f"evidence lacks {', '.join(missing)}")
        else:
            reasons.extend(_JUDGES[name](_Case(serving, check.evidence, want)))
    tally.reasons.extend(f"{name}: {reason}" for reason in reasons)
    tally.checks.append(
        replace(check, passed=not reasons, reason="; ".join(reasons) or check.reason)
    )


def _skip_reasons(name: str, want: Expectations) -> list[str]:
    if not want.offer.attached:
        return ["only an attached engine may skip a check"]
    if not want.allow_attached:
        return ["the policy does not allow attached engines (allow_attached)"]
    if name not in gc.ATTACHED_MAY_SKIP:
        return ["this check may not be skipped"]
    if name == gc.KV_CONNECTOR and want.offer.role is not Role.BOTH:
        return [f"a {want.offer.role} worker cannot do without a KV connector"]
    return []


def _model_revision(case: _Case) -> list[str]:
    found, wanted = case.evidence["manifest_digest"], case.want.offer.manifest_digest
    return [] if found == wanted and wanted else [f"loaded {found}, ordered {wanted or 'nothing'}"]


def _tokenizer_revision(case: _Case) -> list[str]:
    manifest = case.want.manifest
    if manifest is None:
        return ["the manifest is not known, so its tokenizer cannot be compared"]
    found, wanted = case.evidence["tokenizer_digest"], manifest.tokenizer_digest
    reasons = [] if found == wanted else [f"loaded {found or 'none'}, manifest {wanted or 'none'}"]
    if case.serving.tokenizer_digest != wanted:
        reasons.append(f"serving says {case.serving.tokenizer_digest or 'none'}")
    read, right = (_tokens(case.evidence.get(f"{n}_token_ids")) for n in ("text", "wanted"))
    if right is not None and read != right:
        reasons.append(f"the engine reads a text as {_shown(read)}, the artifact {_shown(right)}")
    if case.evidence.get("round_trip") is False:
        reasons.append("a text does not come back from its tokens")
    return reasons


def _tensor_checksums(case: _Case) -> list[str]:
    reasons = []
    failed = case.evidence["failed"]
    if failed:
        reasons.append(f"did not match: {_shown(failed)}")
    verified, total = _count(case, "chunks_verified"), _count(case, "chunks_total")
    if case.want.manifest is not None:
        wanted = sum(len(f.chunks) for f in case.want.manifest.files if f.purpose == "weights")
        if total is None or total < wanted:
            reasons.append(f"chunks_total {total}, the manifest's weights have {wanted}")
    if verified is None or total is None or verified != total or total <= 0:
        reasons.append(f"verified {verified} of {total} chunks")
    return reasons


def _shard_coverage(case: _Case) -> list[str]:
    reasons = []
    if case.evidence["missing"]:
        reasons.append(f"missing: {_shown(case.evidence['missing'])}")
    found, expected = _count(case, "tensors"), _count(case, "tensors_expected")
    if found is None or found != expected:
        reasons.append(f"{found} of {expected} tensors")
    manifest = case.want.manifest
    if manifest is not None and expected != len(manifest.tensors):
        reasons.append(f"tensors_expected {expected}, the manifest lists {len(manifest.tensors)}")
    ranks = _count(case, "ranks")
    if ranks != case.want.offer.ranks:
        reasons.append(f"ranks {ranks}, offered {case.want.offer.ranks}")
    return reasons + _rank_ownership(case)


def _rank_ownership(case: _Case) -> list[str]:
    """Of several ranks each must hold, whole or in part, exactly the tensors that it owns (R10.3)."""
    offered, manifest = case.want.offer.ranks, case.want.manifest
    if offered == 1 or manifest is None:
        return []
    held = case.evidence.get("rank_tensors")
    if not isinstance(held, Sequence) or len(held) != offered:
        return [f"rank_tensors {held}: one number for each of {offered} ranks is wanted"]
    owned = [
        sum(not tensor.ranks or rank in tensor.ranks for tensor in manifest.tensors)
        for rank in range(offered)
    ]
    return [
        f"rank {rank} holds {found} tensors, it owns {wanted}"
        for rank, (found, wanted) in enumerate(zip(held, owned, strict=True))
        if found != wanted
    ]


def _kv_connector(case: _Case) -> list[str]:
    detail = case.evidence["detail"]
    if case.want.offer.role is Role.BOTH and case.serving.kv.connector in NO_CONNECTOR:
        return []  # it is paired with itself only
    return [
        f"not reachable {way} ({detail})"
        for way in ("outbound", "inbound")
        if case.evidence[way] is not True
    ]


def _canary(case: _Case) -> list[str]:
    answer = _tokens(case.evidence["token_ids"])
    reasons = []
    canary = case.want.manifest.canary if case.want.manifest else None
    if not answer:
        reasons.append("no answer")
    elif canary is not None:
        if answer != canary.golden_token_ids:
            reasons.append(
                f"answered {_shown(answer)}, known answer {_shown(canary.golden_token_ids)}"
            )
    elif case.want.offer.attached:
        again = _tokens(case.evidence.get("repeat_token_ids"))
        if again != answer:
            reasons.append(f"answered {_shown(answer)}, asked again {_shown(again or ())}")
    else:
        reasons.append("the manifest has no known answer")
    reasons.extend(
        f"{name} is {case.evidence[name]!r}"
        for name in ("eos_ok", "sampling_ok")
        if case.evidence[name] is not True
    )
    return reasons


def _basics(case: _Case) -> list[str]:
    reasons = [
        f"{name} is {case.evidence[name]!r}"
        for name in ("eos", "max_tokens")
        if case.evidence[name] is not True
    ]
    reasons.extend(
        f"{name} is {case.evidence[name]!r}"
        for name in ("structured", "sampling")
        if case.evidence[name] is not True and case.evidence[name] != gc.NOT_OFFERED
    )
    return [*reasons, *_format_reasons(case)]


def _format_reasons(case: _Case) -> list[str]:
    """Weights and KV in the formats that were ordered, as far as the engine tells its own."""
    reasons = []
    manifest = case.want.manifest
    told, kv = str(case.evidence["quantisation"]), str(case.evidence["kv_dtype"])
    if manifest is not None and told not in (gc.NOT_TOLD, manifest.quantisation):
        reasons.append(f"quantisation {told}, manifest {manifest.quantisation}")
    served = case.serving.kv.dtype
    if served == gc.KV_DTYPE_UNKNOWN:
        return reasons  # nobody could say
    if kv not in (gc.NOT_TOLD, gc.KV_DTYPE_AUTO, served):
        reasons.append(f"KV in {kv}, serving says {served}")
    wanted = None if manifest is None else manifest.config.get("kv_dtype")
    if isinstance(wanted, str) and not case.want.offer.attached and served != wanted:
        reasons.append(f"KV in {served}, manifest {wanted}")
    return reasons


def _kv_pool(case: _Case) -> list[str]:
    total, free = _count(case, "kv_total_blocks"), _count(case, "free_blocks")
    reasons = []
    if total is None or total <= 0:
        return [f"kv_total_blocks is {total}"]
    if total != case.serving.kv_total_blocks:
        reasons.append(f"{total} blocks, serving says {case.serving.kv_total_blocks}")
    wanted = case.evidence.get("wanted_blocks")
    if isinstance(wanted, int) and total < gc.KV_BLOCKS_SHARE_MIN * wanted:
        reasons.append(f"{total} blocks, {wanted} ordered")
    if free is None or not FREE_BLOCKS_SHARE_MIN * total - 1 <= free <= total:
        reasons.append(f"{free} of {total} blocks free after the canary")
    return reasons


def _kv_hashes(case: _Case) -> list[str]:
    """Whether the worker names a prompt's blocks as the router does (field report B95).

    A worker that tells of no blocks may join: its prefixes are guessed, and that is said (B102).
    One that names them otherwise would never be found to hold anything.
    """
    told = case.evidence["told"]
    if not told:
        return []
    size = _count(case, "block_size")
    if size != case.serving.block_size:
        return [f"blocks of {size} tokens, serving says {case.serving.block_size}"]
    tokens = _tokens(case.evidence["token_ids"]) or ()
    try:
        wanted = [str(h) for h in sequence_hashes(pack_tokens(tokens), size)]
    except InvalidField as error:
        return [str(error)]
    if not wanted:
        return [f"{len(tokens)} tokens are no full block of {size}"]
    missing = sorted(set(wanted) - {str(h) for h in told})
    return [f"hash_mismatch: told {_shown(told)}, wanted {_shown(wanted)}"] if missing else []


def _profile(case: _Case) -> list[str]:
    name, digest = case.evidence["name"], case.evidence["digest"]
    reasons = []
    if name != case.serving.profile:
        reasons.append(f"{name}, serving says {case.serving.profile}")
    known = case.want.profiles.get(str(name))
    if known is None:
        reasons.append(f"{name} is not registered; known: {', '.join(sorted(case.want.profiles))}")
    elif known != digest:
        reasons.append(f"{name} has digest {digest}, registered {known}")
    return reasons


def _lease(case: _Case) -> list[str]:
    reasons = []
    if case.evidence["epoch"] != case.want.epoch:
        reasons.append(f"epoch {case.evidence['epoch']}, the lease has {case.want.epoch}")
    if not case.want.lease_valid:
        reasons.append(case.want.lease_why or "the lease is not valid")
    return reasons


def _group(case: _Case) -> list[str]:
    if case.want.group_state != "published":
        return [f"the group is {case.want.group_state}"]
    found = case.evidence["group_epoch"]
    if found != case.want.group_epoch:
        return [f"group epoch {found}, published {case.want.group_epoch}"]
    return []


_JUDGES: Mapping[str, _Judge] = {
    gc.MODEL_REVISION: _model_revision,
    gc.TOKENIZER_REVISION: _tokenizer_revision,
    gc.TENSOR_CHECKSUMS: _tensor_checksums,
    gc.SHARD_COVERAGE: _shard_coverage,
    gc.KV_CONNECTOR: _kv_connector,
    gc.CANARY: _canary,
    gc.BASICS: _basics,
    gc.KV_POOL: _kv_pool,
    gc.KV_HASHES: _kv_hashes,
    gc.PROFILE: _profile,
    gc.LEASE: _lease,
    gc.GROUP: _group,
}


def _serving_reasons(serving: Serving, want: Expectations) -> list[str]:
    reasons = []
    for name in ("kv_total_blocks", "block_size", "max_model_len", "max_num_seqs"):
        value = getattr(serving, name)
        if value <= 0:
            reasons.append(f"serving.{name}: {value} is not above 0")
    if serving.kv.block_size != serving.block_size:
        reasons.append(f"serving.kv.block_size: {serving.kv.block_size} != {serving.block_size}")
    if serving.kv.hash_scheme not in want.hash_schemes:
        known = ", ".join(sorted(want.hash_schemes))
        reasons.append(f"serving.kv.hash_scheme: {serving.kv.hash_scheme} is not one of {known}")
    if not want.offer.attached and serving.kv.model_digest != want.offer.manifest_digest:
        reasons.append(
            f"serving.kv.model_digest: {serving.kv.model_digest} is not the ordered "
            f"{want.offer.manifest_digest}"
        )
    if not url_is_plausible(serving.engine_url):
        reasons.append(f"serving.engine_url: {serving.engine_url!r} is not http://host:port")
    return reasons


def url_is_plausible(url: str) -> bool:
    """Whether a URL may be a worker's: http(s) with a host, and no link-local (metadata) address.

    Field report B174: a registered address is dialled and is sent users' prompts.
    """
    scheme, _, rest = url.partition("://")
    authority = rest.split("/", 1)[0]
    host = authority.rsplit(":", 1)[0].strip("[]").lower()
    if scheme not in ("http", "https") or not host or "@" in authority:
        return False
    return not host.startswith(("169.254.", "fe80:", "fd00:ec2:", "metadata."))


def offered_profile(checks: Sequence[CheckResult]) -> ClassProfile | None:
    """The class profile that the evidence carries whole, if it does and is what it says.

    Raises:
        InvalidField: the document is not a profile.
    """
    for check in checks:
        document = check.evidence.get("document")
        if check.name == gc.PROFILE and isinstance(document, Mapping):
            profile = ClassProfile.from_document(document)
            if profile.digest == check.evidence.get("digest"):
                return profile
    return None


def _count(case: _Case, name: str) -> int | None:
    value = case.evidence[name]
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _tokens(value: object) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list | tuple) else None


def _shown(value: Any) -> str:
    items = list(value) if isinstance(value, list | tuple) else [value]
    head = ", ".join(str(v) for v in items[:8])
    return head if len(items) <= 8 else f"{head}, ... ({len(items)} in all)"
