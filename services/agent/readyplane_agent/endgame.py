"""Chunks that hold a load up, and which of the last a second source may bring beside a slow one. Pure.

A chunk is asked of one source at a time, and a source that sends too slowly is left only at its
limit (8 s silent, 60 s dribbling). For the last few chunks that is most of the load, so they may be
asked of a second source; the first verified bytes win. `fanout` keeps the account, and what was
read twice is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from readyplane_agent.chunk_order import COMING, MISSING, Held

# So many chunks may be left when it begins, and be asked for twice in one load: as many as four
# sources that hang together were asked for, over four connections each.
ENDGAME_CHUNKS_MAX = 16
# A chunk is slow when it takes longer than this and than so many of the usual ones.
ENDGAME_AFTER_S = 1.0
ENDGAME_USUAL = 4.0
# Nothing was given for so long, at any time of a load: somebody else is asked for what is left.
STALLED_AFTER_S = 2.0
# A store may have to fetch first: so long its silence holds room that another source waits for.
STORE_SILENT_S = 8.0


@dataclass(frozen=True, slots=True)
class Lent:
    """A chunk that a source was asked for, and when."""

    chunk: int
    source_id: str
    since_s: float


def slow_after_s(usual_s: float) -> float:
    """From when on one of the last chunks is slow; `usual_s` as of `slow`."""
    return max(ENDGAME_AFTER_S, ENDGAME_USUAL * usual_s)


def slow(
    lent: Iterable[Lent], ours: bytes | bytearray, *, now_s: float, usual_s: float
) -> list[Lent]:
    """Chunks that hold up the end of the load, longest first; none before the end has come.

    Args:
        ours: what we hold and are bringing (`Arena.progress`).
        usual_s: how long chunks of this load took so far, 0 while that is not known.
    """
    if ours.count(MISSING) or not 0 < ours.count(COMING) <= ENDGAME_CHUNKS_MAX:
        return []
    late = [one for one in lent if now_s - one.since_s > slow_after_s(usual_s)]
    return sorted(late, key=lambda one: (one.since_s, one.chunk))


def stalled_s(lent: Iterable[Lent], *, now_s: float, usual_s: float) -> float:
    """Seconds since the chunk that a source was asked for last, where all have been out for long.

    0 while that is not so. Such a source gives nothing, as a stopped process does.
    """
    newest_s = max((one.since_s for one in lent), default=now_s)
    return _if_long(now_s - newest_s, usual_s)


def quiet_s(lent: Iterable[Lent], *, gave_s: float, now_s: float, usual_s: float) -> float:
    """Seconds in which a load got nothing, though chunks were out; 0 while that is not long.

    Whoever is asked in addition and gives nothing either does not make it shorter.

    Args:
        gave_s: when a chunk came last, from anybody.
    """
    oldest_s = min((one.since_s for one in lent), default=now_s)
    return _if_long(now_s - max(gave_s, oldest_s), usual_s)


def _if_long(seconds: float, usual_s: float) -> float:
    """So many seconds without anything, 0 while that is not long."""
    return seconds if seconds > max(STALLED_AFTER_S, ENDGAME_USUAL * usual_s) else 0.0


def in_vain(
    silent: Mapping[str, Sequence[float]],
    *,
    asks: str,
    stores: Collection[str],
    usual_s: float,
) -> str | None:
    """The source to be left because its reads hold room in the byte budget and nothing comes.

    The one that has said nothing for longest, and only where none of its reads moves, so that a
    slow source keeps its room. Who hangs himself may not ask for this.

    Args:
        silent: source -> for each of its connections, seconds since it got or asked for something.
        asks: the source that a chunk is to come from and that has no room for it.
        stores: those of the sources that are byte stores.
    """

    def hangs_s(name: str) -> float:
        quietest = min(silent[name], default=0.0)
        return quietest if name not in stores or quietest > STORE_SILENT_S else 0.0

    if any(_if_long(seconds, usual_s) for seconds in silent.get(asks, ())):
        return None
    others = {name: _if_long(hangs_s(name), usual_s) for name in silent if name != asks}
    found = max(others, key=lambda name: others[name], default=None)
    return found if found is not None and others[found] else None


def second(
    late: Iterable[Lent], *, source_id: str, held: Held, doubled: Collection[int], done: int
) -> int | None:
    """The chunk that this source may bring as well, None when there is none.

    Args:
        late: as of `slow`. doubled: chunks that two sources bring now. done: how many were asked
            for twice in this load.
    """
    if done >= ENDGAME_CHUNKS_MAX:
        return None
    for one in late:
        if one.source_id != source_id and one.chunk not in doubled and held.has(one.chunk):
            return one.chunk
    return None
