"""Who can give these bytes to whom, and at what cost. Pure.

Owns the order of sources for one target (R8.2, R8.4) and the reasons for each place. Handed to the
service; live facts come from the live store, whose clock alone judges what has expired, rates from
`rates`, and starters that read behind starters from `fanout`.

The predicted seconds of a source with bandwidth B, m places and r readers, for S bytes:

- a place is free: S * (r + 1) / B, since the readers share the source;
- all taken: the next place frees after about T * m / (m + 1) with T = S * m / B (m transfers at
  even phases have all but 1/(m + 1) of one behind them), and then the transfer takes T.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from readyplane.core.chunks import ChunkRanges
from readyplane.core.startup import OWN_REQUESTS, WeightTier
from readyplane_registry.fanout import Chain
from readyplane_registry.rates import (
    DEFAULT_POLICY,
    UNMEASURED,
    Bandwidth,
    SourcePolicy,
    headroom,
)

STORAGE_PREFIX = "storage:"
FILES = "file:"
LOADING_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Candidate:
    """One source as the live store sees it now.

    Attributes:
        storage: the registry's own byte store, the last fallback.
        announced_bytes_per_s: what the source says of itself; 0 when it says nothing.
        measured: what transfers from this very source have shown.
        announced_ago_s: since this incarnation's first announcement.
        expires_in_s: negative when the announcement has run out; None for storage.
        barred: why it must not be offered (quarantined, dead); empty when it may.
        barred_for_s: for how much longer.
        slo_share: the larger of TTFT and TPOT there, as a share of its target; None: not known.
        partial: it is still loading: of the chunks that the target misses it has `gives`, and
            lacks `lacks_bytes`.
        reads_from: the sources at which it has a reader's place itself.
    """

    source_id: str
    tier: WeightTier
    url: str
    worker_id: str = ""
    incarnation: str = ""
    node: str = ""
    storage: bool = False
    announced_bytes_per_s: float = 0.0
    measured: Bandwidth = UNMEASURED
    readers: int = 0
    readers_max: int = 2
    announced_ago_s: float = 0.0
    expires_in_s: float | None = None
    barred: str = ""
    barred_for_s: float = 0.0
    rack: str = ""
    layout_digest: str = ""
    slo_share: float | None = None
    draining: bool = False
    partial: bool = False
    gives: ChunkRanges = ()
    lacks_bytes: int = 0
    reads_from: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """Who wants the bytes.

    Attributes:
        layout_digest: in which it needs them; empty: as in the manifest.
        chunk_bytes: the piece in which bytes pass along a chain of starters.
    """

    worker_id: str
    incarnation: str
    node: str = ""
    rack: str = ""
    layout_digest: str = ""
    chunk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ranked:
    """A source at its place: predicted seconds in all, the wait in it, and the reason.

    `bound_s` is R7.1: size over the best bandwidth ever measured here, None if none was.
    `complete_in_s`: until a source that still loads has all; None for one that has.
    """

    candidate: Candidate
    predicted_s: float
    wait_s: float
    bandwidth_bytes_per_s: float
    bound_s: float | None
    why: str
    complete_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Sources best first, and who was left out with the reason."""

    sources: tuple[Ranked, ...]
    excluded: tuple[str, ...]
    retry_after_s: float | None = None


def rank(
    candidates: Iterable[Candidate],
    *,
    target: Target,
    size_bytes: int,
    tiers: Mapping[WeightTier, Bandwidth],
    policy: SourcePolicy = DEFAULT_POLICY,
) -> Ranking:
    """Order the sources for one target; the same facts give the same order.

    Peers come by predicted seconds, storage always comes last (a peer that can give saves the
    store's bytes), and is left out only when it says itself that it has not the bytes.
    """
    excluded: list[str] = []
    usable: list[Candidate] = []
    newest = _newest_by_url(candidates_ := sorted(candidates, key=lambda c: c.source_id))
    for candidate in candidates_:
        reason = _reason_against(candidate, target, newest, policy)
        if reason:
            excluded.append(f"{candidate.source_id}: {reason}")
        else:
            usable.append(candidate)
    chain = Chain(
        candidates_,
        rate_of=lambda c: _bandwidth(c, target, tiers, policy)[0],
        chunk_bytes=target.chunk_bytes,
        behind_max=policy.behind_max,
    )
    placed: list[Ranked] = []
    for candidate in usable:
        ranked = _predict(candidate, target, size_bytes, tiers, policy)
        behind = _behind(ranked, chain, target) if candidate.partial else ranked
        if isinstance(behind, str):
            excluded.append(f"{candidate.source_id}: {behind}")
        else:
            placed.append(behind)
    placed.sort(key=lambda r: (r.candidate.storage, r.predicted_s, r.candidate.source_id))
    placed, slow = _without_slow(placed, policy)
    placed, late = _without_late(placed, policy)
    return Ranking(
        tuple(replace(r, why=f"place {n}: {r.why}") for n, r in enumerate(placed, start=1)),
        (*excluded, *slow, *late),
        None if placed else _retry_after_s(candidates_),
    )


def _behind(ranked: Ranked, chain: Chain[Candidate], target: Target) -> Ranked | str:
    """A source that still loads, at its place; or why nobody should wait for it."""
    mine = ranked.candidate
    if mine.lacks_bytes <= 0:
        return ranked
    if target.worker_id and target.worker_id in chain.workers_above(mine):
        return "it reads from the target itself"
    above = chain.above(mine)
    if isinstance(above, str):
        return above
    # The last chunk passes on after it has come; all others are on the way meanwhile.
    last_s = target.chunk_bytes / ranked.bandwidth_bytes_per_s
    predicted_s = max(ranked.predicted_s, above.complete_in_s + last_s)
    behind = " behind ".join((mine.source_id, *above.names))
    why = f"{ranked.why}; still loading ({behind}), complete in {above.complete_in_s:.2f} s"
    return replace(ranked, predicted_s=predicted_s, why=why, complete_in_s=above.complete_in_s)


def _retry_after_s(candidates: Sequence[Candidate]) -> float | None:
    """When somebody may have a place that has none now; None when nobody is in sight."""
    soon = [c.barred_for_s for c in candidates if c.barred]
    if any(c.partial for c in candidates):
        soon.append(LOADING_RETRY_S)
    return max(LOADING_RETRY_S, min(soon)) if soon else None


def _newest_by_url(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Of several live records at one address only the latest can be the process there (B144)."""
    newest: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.url.startswith(FILES):  # a folder is shared by all processes of a node
            continue
        if candidate.expires_in_s is not None and candidate.expires_in_s <= 0:
            continue
        held = newest.get(candidate.url)
        if held is None or candidate.announced_ago_s < held.announced_ago_s:
            newest[candidate.url] = candidate
    return {url: candidate.source_id for url, candidate in newest.items()}


def _reason_against(
    candidate: Candidate, target: Target, newest: Mapping[str, str], policy: SourcePolicy
) -> str:
    if candidate.worker_id and candidate.worker_id == target.worker_id:
        return "it is the target itself" + (
            "" if candidate.incarnation == target.incarnation else ", an earlier life of it"
        )
    if candidate.incarnation and candidate.incarnation == target.incarnation:
        return "it is the target itself"
    if candidate.expires_in_s is not None and candidate.expires_in_s <= 0:
        return f"its announcement expired {-candidate.expires_in_s:.1f} s ago"
    if candidate.barred:
        return f"{candidate.barred}; offered again in {candidate.barred_for_s:.0f} s"
    if candidate.draining:
        return "it leaves and takes no new readers"
    if candidate.layout_digest != target.layout_digest and not candidate.storage:
        return (
            f"its layout is {candidate.layout_digest or 'that of the manifest'}, needed is "
            f"{target.layout_digest or 'that of the manifest'}"
        )
    if headroom(candidate.slo_share, policy) <= 0:
        return (
            f"{OWN_REQUESTS} {candidate.slo_share:.0%} of their TTFT or TPOT target, "
            f"over {policy.slo_share_max:.0%}"
        )
    if candidate.url.startswith(FILES) and candidate.node != target.node:
        return f"its files lie on node {candidate.node or 'unknown'}, the target is elsewhere"
    owner = newest.get(candidate.url, candidate.source_id)
    if owner != candidate.source_id:
        return f"its address now belongs to {owner}"
    return ""


def _predict(
    candidate: Candidate,
    target: Target,
    size_bytes: int,
    tiers: Mapping[WeightTier, Bandwidth],
    policy: SourcePolicy,
) -> Ranked:
    rate, whence = _bandwidth(candidate, target, tiers, policy)
    left = headroom(candidate.slo_share, policy)
    if left < 1:
        rate, whence = rate * left, f"{whence}, of which serving leaves {left:.0%}"
    places, readers = max(1, candidate.readers_max), candidate.readers
    if readers < places:
        wait_s, transfer_s = 0.0, size_bytes * (readers + 1) / rate
        queue = f"{readers} of {places} readers, no wait"
    else:
        transfer_s = size_bytes * places / rate
        wait_s = transfer_s * places / (places + 1)
        queue = f"all {places} places taken, a wait of about {wait_s:.2f} s"
    best = (
        candidate.measured.best_bytes_per_s
        or tiers.get(candidate.tier, UNMEASURED).best_bytes_per_s
    )
    bound_s = size_bytes / best if best > 0 else None
    bound = (
        "no bound measured yet"
        if bound_s is None
        else f"bound {bound_s:.2f} s at the best measured {best / 1e6:.0f} MB/s"
    )
    predicted_s = wait_s + transfer_s
    kind = "storage, the last fallback" if candidate.storage else f"tier {candidate.tier}"
    why = (
        f"{kind}, {predicted_s:.2f} s for {size_bytes / 1e6:.1f} MB: {queue}, "
        f"{rate / 1e6:.0f} MB/s {whence}; {bound}"
    )
    return Ranked(candidate, predicted_s, wait_s, rate, bound_s, why)


def _bandwidth(
    candidate: Candidate,
    target: Target,
    tiers: Mapping[WeightTier, Bandwidth],
    policy: SourcePolicy,
) -> tuple[float, str]:
    """Bytes per second of the source and where the figure comes from, most telling first."""
    own = candidate.measured
    if own.samples and own.mean_bytes_per_s > 0:
        return own.mean_bytes_per_s, f"measured here ({own.samples} transfers)"
    factor, note = 1.0, ""
    if candidate.node and candidate.node == target.node:
        factor, note = policy.same_node_factor, f", same node counted {policy.same_node_factor:g}x"
    elif candidate.rack and candidate.rack == target.rack:
        factor, note = policy.same_rack_factor, f", same rack counted {policy.same_rack_factor:g}x"
    tier = tiers.get(candidate.tier, UNMEASURED)
    word = candidate.announced_bytes_per_s
    if tier.samples and tier.mean_bytes_per_s > 0 and not 0 < word < tier.mean_bytes_per_s:
        return (
            tier.mean_bytes_per_s * factor,
            f"measured in tier {candidate.tier} ({tier.samples} transfers){note}",
        )
    if word > 0:
        return word * factor, f"by its own word{note}"
    return (
        policy.prior_bytes_per_s[candidate.tier] * factor,
        f"assumed for tier {candidate.tier} until measured{note}",
    )


def _without_late(placed: list[Ranked], policy: SourcePolicy) -> tuple[list[Ranked], list[str]]:
    """Leave out sources that still load and are waited for longer than storage would take."""
    stores = [r.predicted_s for r in placed if r.candidate.storage]
    limit_s = min(stores, default=math.inf) * policy.behind_storage_factor
    late = [r for r in placed if r.complete_in_s is not None and r.predicted_s > limit_s]
    if not late:
        return placed, []
    names = {r.candidate.source_id for r in late}
    return [r for r in placed if r.candidate.source_id not in names], [
        f"{r.candidate.source_id}: it still loads and would take {r.predicted_s:.2f} s, storage "
        f"{min(stores):.2f} s"
        for r in late
    ]


def _without_slow(placed: list[Ranked], policy: SourcePolicy) -> tuple[list[Ranked], list[str]]:
    """Leave out peers whose *measured* rate is far below storage's measured one."""
    storage = [r.bandwidth_bytes_per_s for r in placed if r.candidate.storage]
    measured = any(r.candidate.storage and r.candidate.measured.samples for r in placed)
    if not storage or not measured:
        return placed, []
    floor = max(storage) / policy.slower_than_storage_max
    kept: list[Ranked] = []
    slow: list[str] = []
    for ranked in placed:
        mine = ranked.candidate
        if mine.storage or not mine.measured.samples or ranked.bandwidth_bytes_per_s >= floor:
            kept.append(ranked)
        else:
            slow.append(
                f"{mine.source_id}: its measured {ranked.bandwidth_bytes_per_s / 1e6:.0f} MB/s is "
                f"less than storage's {max(storage) / 1e6:.0f} MB/s by more than "
                f"{policy.slower_than_storage_max:g}x"
            )
    return kept, slow


def is_storage(source_id: str) -> bool:
    """True for the source id of a registry's own byte store."""
    return source_id.startswith(STORAGE_PREFIX)
