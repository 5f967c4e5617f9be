"""Who comes and who goes, so that no generation is ever left with half a pair.

A request is served by a prefill and a decode worker of one generation. So a generation serves the
share min(P / target P, D / target D) of what the pools are meant for, and the shares of all
generations add up. An old worker may go while the sum stays at one (or where it was, if it was
less): then it was in surplus. With both pools filled up to target + surge somebody always is.
"""

from __future__ import annotations

from collections.abc import Sequence

from readyplane_planner.rollout.values import Member, Side, Sides, Stage

CLOSE = 1e-9
Counts = dict[str, list[int]]
Ids = tuple[tuple[str, ...], tuple[str, ...]]


def serving(sides: Sides, goal: str) -> Counts:
    """Serving workers (P, D) by artifact; those of the goal once they served long enough."""
    found: Counts = {}
    for place, side in enumerate(sides):
        for member in side.members:
            if _serves(member, goal):
                found.setdefault(member.digest, [0, 0])[place] += 1
    return found


def _serves(member: Member, goal: str) -> bool:
    fresh = member.stage is Stage.FRESH and member.digest != goal
    return member.stage is Stage.READY or fresh


def share(count: Sequence[int], sides: Sides) -> float:
    """What one generation serves of what the pools are meant for."""
    wanted = [count[place] / s.target for place, s in enumerate(sides) if s.target > 0]
    return min(wanted, default=1.0)


def served(counts: Counts, sides: Sides) -> float:
    """What all generations serve together."""
    return sum(share(count, sides) for count in counts.values())


def pairs(counts: Counts, digest: str, sides: Sides) -> bool:
    """Whether that generation serves end to end in every pool that is meant to serve."""
    count = counts.get(digest, [0, 0])
    return all(count[place] > 0 for place, s in enumerate(sides) if s.target > 0)


def others(sides: Sides, goal: str) -> tuple[list[Member], list[Member]]:
    """Members of any other artifact, by pool."""
    p, d = ([m for m in s.members if m.digest not in ("", goal)] for s in sides)
    return p, d


def starts(
    sides: Sides, goal: str, *, surge: int, first: bool, room_gpus: int | None
) -> tuple[int, int]:
    """Workers of the goal to start above what the guard orders.

    Args:
        first: only the first ones, which are to prove it. room_gpus: left in the budget.
    """
    old = others(sides, goal)
    # Each further generation may hold one worker of a pool in surplus that is none of its own.
    surge += max(0, len({m.digest for m in (*old[0], *old[1])}) - 1)
    wanted = [_wanted(side, goal, surge, first=first) for side in sides]
    if room_gpus is None:
        return wanted[0], wanted[1]
    given = [0, 0]
    while any(g < w for g, w in zip(given, wanted, strict=True)):
        # In turns, whoever has less of the goal first, so that a pair comes of it.
        order = sorted((0, 1), key=lambda i: (_of(sides[i], goal) + given[i], i))
        place = next(
            (i for i in order if given[i] < wanted[i] and sides[i].gpus <= room_gpus), None
        )
        if place is None:
            break
        given[place] += 1
        room_gpus -= sides[place].gpus
    return given[0], given[1]


def _wanted(side: Side, goal: str, surge: int, *, first: bool) -> int:
    """How many starts one pool has room for."""
    if side.waits:
        return 0
    live, mine = len(side.members), _of(side, goal)
    pending = sum(m.stage in (Stage.COMING, Stage.ALONE) for m in side.members)
    room = min(
        side.target + surge - live - side.grow,
        # Those who drain hold their GPUs too: so many again may, and no more.
        side.target + 2 * surge - live - side.grow - len(side.leaving),
        side.step_up - side.grow,
        side.pending_max - side.grow - pending,
        (min(surge, side.target) if first else side.target - side.grow) - mine,
    )
    return max(0, room)


def _of(side: Side, digest: str) -> int:
    return sum(m.digest == digest for m in side.members)


def retire(sides: Sides, goal: str) -> Ids:
    """Workers of other generations who may go now, by pool.

    At once: whoever has no partner. Then those in surplus, at most a step of each pool; the last
    pair of a generation goes together.
    """
    gone: tuple[list[str], list[str]] = ([], [])
    old = others(sides, goal)
    for place in (0, 1):
        gone[place].extend(m.worker_id for m in old[place] if m.stage is Stage.ALONE)
    left = tuple(
        sorted(
            (m for m in members if _serves(m, goal)),
            key=lambda m: (m.active, m.number, m.worker_id),
        )
        for members in old
    )
    _surplus(sides, left, [s.step_down for s in sides], gone, serving(sides, goal))
    return tuple(gone[0]), tuple(gone[1])


def shed(sides: Sides, keep: str, *, surge: int, unproved: str = "") -> Ids:
    """Whom a smaller target lets go while generations stand side by side; `keep` goes last.

    What the surge put beside the others stays: it is gone soon enough once it goes on. Nobody of
    `unproved` goes, and nobody goes because of what it serves.
    """
    gone: tuple[list[str], list[str]] = ([], [])
    left = tuple(
        sorted(
            (m for m in s.members if _serves(m, keep) and m.digest != unproved),
            key=lambda m: (m.digest == keep, m.active, m.number, m.worker_id),
        )
        for s in sides
    )
    most = [max(s.shrink, min(s.step_down, len(s.members) - s.target - surge)) for s in sides]
    counts = {d: count for d, count in serving(sides, keep).items() if d != unproved}
    _surplus(sides, (left[0], left[1]), most, gone, counts)
    return tuple(gone[0]), tuple(gone[1])


def _surplus(
    sides: Sides,
    left: tuple[list[Member], ...],
    most: list[int],
    gone: tuple[list[str], list[str]],
    counts: Counts,
) -> None:
    """Move members from `left` to `gone` while enough is served without them."""
    progress = True
    while progress:
        progress = False
        for place in sorted((0, 1), key=lambda i: -most[i]):
            if most[place] < 1:
                continue
            refused: set[str] = set()
            for member in left[place]:
                if member.digest in refused:
                    continue  # one of a generation serves as much as another
                going = _with_partners(member, place, left, counts)
                after = {digest: list(count) for digest, count in counts.items()}
                for where, one in going:
                    after[one.digest][where] -= 1
                if served(after, sides) < min(1.0, served(counts, sides)) - CLOSE:
                    refused.add(member.digest)
                    continue
                for where, one in going:
                    left[where].remove(one)
                    gone[where].append(one.worker_id)
                    most[where] -= 1
                counts, progress = after, True
                break


def _with_partners(
    member: Member, place: int, left: tuple[list[Member], ...], counts: Counts
) -> list[tuple[int, Member]]:
    """The member, and those who are left without a partner when it goes."""
    going = [(place, member)]
    other = 1 - place
    if counts[member.digest][place] == 1:
        going += [(other, m) for m in left[other] if m.digest == member.digest]
    return going
