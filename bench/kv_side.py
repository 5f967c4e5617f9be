"""One side of the index bench, in a process of its own: `python kv_side.py ours|theirs`.

Owns the timing, the same for both. It is told the name of a part on each line of standard input and
answers with one line of JSON. `theirs` runs in an environment that has nothing of ours, so this
file imports only the standard library at the top. The private module of `ai-dynamo-runtime` 1.6.1
is called (so: pinned).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

HEAD = Struct("<BII")
EVENTS = 0
WORKERS = 64
Apply = Callable[[int, bytes], None]
Look = Callable[[Any], Any]
Rebuild = Callable[[], dict[str, float]]


def ours() -> tuple[Apply, Look, Callable[[Any], dict[int, int]], type, Rebuild]:
    """The router's way of a session message into the index."""
    from readyplane.v1 import router_pb2 as pb
    from readyplane.wire.router import renewal_from_proto
    from readyplane_router.membership import KV_BLOCKS_MAX
    from readyplane_router.prefix import PrefixIndex
    from readyplane_router.sharing import pack_snapshot, take_snapshot

    index = PrefixIndex()
    keys: dict[str, str] = {}

    def apply(_worker: int, data: bytes) -> None:
        renewal = renewal_from_proto(pb.SessionRequest.FromString(data))
        key = keys.get(renewal.worker_id)
        if key is None:
            key = keys[renewal.worker_id] = f"{renewal.worker_id}@{renewal.incarnation}"
        index.add(key, blocks_max=KV_BLOCKS_MAX)
        for batch in renewal.kv_events:
            assert index.apply(key, batch.sequence, batch.events, now_s=0.0)

    def plain(found: Any) -> dict[int, int]:
        return {int(key.split("@")[0].rpartition("-")[2]): n for key, n in found.items()}

    def rebuild() -> dict[str, float]:
        """All snapshots, as they lie in Redis, into an index that knows nothing."""
        packed = {
            key: pack_snapshot(*found) for key in keys.values() if (found := index.snapshot(key))
        }
        fresh = PrefixIndex()
        begun_s = time.process_time()
        for key, data in packed.items():
            fresh.add(key, blocks_max=KV_BLOCKS_MAX)
            take_snapshot(fresh, key, data)
        cpu_s = time.process_time() - begun_s
        blocks = sum(fresh.blocks_of(key) for key in packed)
        assert blocks == sum(index.blocks_of(key) for key in packed)
        return {"cpu_s": cpu_s, "blocks": blocks, "bytes": sum(map(len, packed.values()))}

    return apply, lambda hashes: index.matched(hashes, now_s=0.0), plain, tuple, rebuild


def theirs() -> tuple[Apply, Look, Callable[[Any], dict[int, int]], type, Rebuild]:
    """The binding's own: events as JSON in, scores out."""
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    tree = RadixTree()

    def plain(found: Any) -> dict[int, int]:
        return {worker: n for (worker, _rank), n in found.items() if n}

    return tree.apply_event, lambda hashes: tree.find_matches(hashes).scores, plain, list, dict


def main() -> None:
    """Answer until standard input ends."""
    apply, look, plain, kind, rebuild = {"ours": ours, "theirs": theirs}[sys.argv[1]]()
    before = memory()
    for line in sys.stdin:
        if line.strip() == "rebuild":
            print(json.dumps(rebuild()), flush=True)
            continue
        ops = read(Path(line.strip()).read_bytes())
        answer = part(ops, apply, look, plain, kind)
        del ops
        print(json.dumps({**answer, "memory": memory() - before}), flush=True)


def read(data: bytes) -> list[tuple[int, int, bytes]]:
    """The operations of a part."""
    out: list[tuple[int, int, bytes]] = []
    at = 0
    while at < len(data):
        what, worker, size = HEAD.unpack_from(data, at)
        at += HEAD.size
        out.append((what, worker, data[at : at + size]))
        at += size
    return out


def part(
    ops: list[tuple[int, int, bytes]],
    apply: Apply,
    look: Look,
    plain: Callable[[Any], dict[int, int]],
    kind: type,
) -> dict[str, Any]:
    """CPU seconds of the events (all threads), seconds of each lookup, and what it found.

    The hashes of a question are made just before it is asked, as those of a prompt are.
    """
    look_s: list[float] = []
    found: list[list[tuple[int, int]]] = []
    cpu_s = 0.0
    begun_s = time.process_time()
    for what, worker, body in ops:
        if what == EVENTS:
            apply(worker, body)
            continue
        cpu_s += time.process_time() - begun_s
        hashes = kind(array("Q", body))
        from_s = time.perf_counter()
        answer = look(hashes)
        look_s.append(time.perf_counter() - from_s)
        found.append(sorted(plain(answer).items()))
        begun_s = time.process_time()
    cpu_s += time.process_time() - begun_s
    return {"cpu_s": cpu_s, "look_s": look_s, "found": found}


def memory() -> int:
    """Resident bytes, after what was freed was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
