"""How an artifact is divided among the ranks of one worker (R10.3, R17). Pure.

Owns the plans of all ranks, the bytes of weight files that are no tensor's (headers, gaps), and the
proof that together the ranks hold every tensor once. A checkpoint is cut by the rules of tensor
parallelism; an artifact that was placed for ranks when it was published is taken as placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from readyplane.core.errors import IdentityMismatch, InvalidField
from readyplane.core.identity import Manifest
from readyplane_agent.engines.layout import ARENA_ALIGN_BYTES
from readyplane_agent.engines.ranks import TP_MAX
from readyplane_agent.rank_plan import Placement, RankPlan, SplitRule, plan_rank

# Column-parallel layers are cut along their outputs, row-parallel ones along their inputs (Megatron-LM);
# embedding and head along the vocabulary. What is not named is whole on every rank.
TP_RULES: tuple[SplitRule, ...] = (
    *(
        SplitRule(f"*.{name}.{kind}", 0)
        for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj")
        for kind in ("weight", "bias")
    ),
    SplitRule("*.o_proj.weight", 1),
    SplitRule("*.down_proj.weight", 1),
    SplitRule("*embed_tokens.weight", 0),
    SplitRule("*lm_head.weight", 0),
)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What each rank of a worker holds, and what none of them does.

    Attributes:
        ranks: plan of each rank, of its own memory, tensors only.
        rest: weight file -> [start, end) of the bytes that are no tensor's.
        offsets: where in the shared memory they lie: (file, start) of a rest, (file, 0) of a file
            that is no weights. shared_bytes: length of that memory.
    """

    ranks: tuple[RankPlan, ...]
    rest: Mapping[str, tuple[tuple[int, int], ...]]
    offsets: Mapping[tuple[str, int], int]
    shared_bytes: int


def plan_group(manifest: Manifest, *, tp: int) -> GroupPlan:
    """The plan of a worker of `tp` ranks.

    Raises:
        IdentityMismatch: the artifact is placed for another number of ranks.
        InvalidField: names the tensor that cannot be divided, and why.
    """
    if not 1 <= tp <= TP_MAX:
        raise InvalidField("--tp", tp, f"use 1 to {TP_MAX}")
    placed = manifest.world > 1
    if placed and manifest.world != tp:
        sizes = f"tp {manifest.tp}, pp {manifest.pp}, ep {manifest.ep}"
        raise IdentityMismatch(
            "parallel",
            [f"ranks: the artifact is placed for {manifest.world} ({sizes}), the worker has {tp}"],
            f"start it with --tp {manifest.world}, or order an artifact that is not placed",
        )
    rules = () if placed else TP_RULES
    ranks = tuple(
        plan_rank(manifest, rank=rank, tp=tp, rules=rules, small_files=False) for rank in range(tp)
    )
    wrong = uncovered(manifest, ranks)
    if wrong:
        raise IdentityMismatch("weights", wrong[:8], "publish the artifact again")
    offsets: dict[tuple[str, int], int] = {}
    rest: dict[str, tuple[tuple[int, int], ...]] = {}
    end = 0
    for entry in manifest.files:
        pieces: tuple[tuple[int, int], ...] = ((0, entry.size_bytes),)
        if entry.purpose == "weights":
            pieces = rest[entry.path] = _rest(manifest, entry.path, entry.size_bytes)
        for start, stop in pieces:
            offsets[entry.path, start] = end
            end += -(-(stop - start) // ARENA_ALIGN_BYTES) * ARENA_ALIGN_BYTES
    return GroupPlan(ranks, rest, offsets, max(end, ARENA_ALIGN_BYTES))


def uncovered(manifest: Manifest, plans: Sequence[RankPlan]) -> list[str]:
    """Tensors that the ranks do not hold, in part or at all, or that a rank holds which owns it not.

    A tensor is covered by one rank that has it whole, or by parts along one axis that together are
    all of it, none twice.
    """
    held: dict[str, list[tuple[int, Placement]]] = {}
    wrong = []
    for rank, plan in enumerate(plans):
        for placed in plan.placements:
            held.setdefault(placed.tensor.name, []).append((rank, placed))
            owners = placed.tensor.ranks
            if owners and rank not in owners:
                wrong.append(f"{placed.tensor.name} (rank {rank} holds it, {list(owners)} own it)")
    for tensor in manifest.tensors:
        why = _gap(tensor.shape, held.get(tensor.name, ()))
        if why:
            wrong.append(f"{tensor.name} ({why})")
    return sorted(wrong)


def _gap(shape: Sequence[int], parts: Sequence[tuple[int, Placement]]) -> str:
    """Why the parts are not the tensor, once each; empty when they are."""
    if not parts:
        return "no rank holds it"
    ranges = sorted({(p.start, p.stop) for _, p in parts})
    axes = sorted({p.axis for _, p in parts})
    full = shape[axes[0]] if shape else 1
    if len(axes) > 1:
        return f"cut along {axes}"
    if ranges == [(0, full)]:
        return ""
    if len(ranges) != len(parts):
        return "a part is held twice"
    if ranges[0][0] != 0 or ranges[-1][1] != full or any(a[1] != b[0] for a, b in pairwise(ranges)):
        return f"parts {ranges} of {full} along axis {axes[0]}"
    return ""


def _rest(manifest: Manifest, path: str, size_bytes: int) -> tuple[tuple[int, int], ...]:
    """[start, end) of the bytes of a weight file that belong to no tensor, in order."""
    found = []
    at = 0
    spans = ((t.offset_bytes, t.size_bytes) for t in manifest.tensors if t.file == path)
    for start, size in sorted(spans):
        if start > at:
            found.append((at, start))
        at = max(at, start + size)
    if at < size_bytes:
        found.append((at, size_bytes))
    return tuple(found)
