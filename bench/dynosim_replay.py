"""Runs Dynamo's simulator on one specification; a program of its own environment, not of ours.

Owns the call of the private module of `ai-dynamo-runtime` 1.6.1 (so: pinned), nothing else. The
specification and the result are JSON files, so that neither environment needs the other one:
`.venv-dynosim/bin/python bench/dynosim_replay.py SPECIFICATION RESULT`. A planner answers from
outside: each tick is a line of JSON on standard output, its answer one on standard input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found]

COLUMNS = (
    "arrival_time_ms",
    "ttft_ms",
    "itl_ms",
    "input_length",
    "output_length",
    "reused_input_tokens",
)
POOLS = ("prefill", "decode")
ENDED = ("shape_count", "avg_isl", "avg_osl", "avg_ttft_ms", "avg_itl_ms")


class Script:
    """A scaling policy that sets given (milliseconds, prefill, decode) targets, each once."""

    def __init__(self, steps: list[list[float]]) -> None:
        self._steps = [*steps]

    def initial_tick_ms(self) -> float:
        return self._steps[0][0]

    def on_tick(self, _snapshot: dict[str, Any]) -> dict[str, Any]:
        _, prefill, decode = self._steps.pop(0)
        later = self._steps[0][0] if self._steps else 1e12
        return {
            "target_prefill": int(prefill),
            "target_decode": int(decode),
            "next_tick_ms": later,
        }

    def finalize(self, *_: object) -> None:
        """Nothing is kept."""


class Piped:
    """A scaling policy that is asked of whoever holds the other end of the pipe.

    The hook tells sums and means of the time since it was last called, and of each worker's passes
    the last one. Called every `window_ms`, it tells of nearly every request and pass by itself; they
    are handed on together, with the snapshot of then, every `tick_ms`.
    """

    def __init__(self, window_ms: float, tick_ms: float, out: TextIO) -> None:
        self._window_ms = window_ms
        self._every = round(tick_ms / window_ms)
        self._out = out
        self._calls = 0
        self._known: dict[tuple[str, int], dict[str, Any]] = {}
        self._clear()

    def _clear(self) -> None:
        self._seen: dict[str, Any] = {"arrived": 0, "generated": 0.0, "ended": [], "passes": []}

    def initial_tick_ms(self) -> float:
        return self._window_ms

    def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        self._add(snapshot)
        answer = {
            "target_prefill": snapshot["non_draining_prefill_count"],
            "target_decode": snapshot["non_draining_decode_count"],
        }
        if self._calls % self._every == 0:
            told = {f"{pool}_fpm_snapshots": self._last(snapshot, pool) for pool in POOLS}
            self._out.write(json.dumps({**snapshot, **told, "seen": self._seen}) + "\n")
            self._out.flush()
            self._clear()
            answer = json.loads(sys.stdin.readline())
        return {**answer, "next_tick_ms": self._window_ms * (self._calls + 1)}

    def _add(self, snapshot: dict[str, Any]) -> None:
        traffic, seen = snapshot["traffic"], self._seen
        seen["arrived"] += traffic["num_req"]
        if traffic["accept_length_forward_count"]:
            each = traffic["avg_accept_length"]
            seen["generated"] += traffic["accept_length_forward_count"] * each
        if traffic["shape_count"]:
            seen["ended"].append([traffic[name] for name in ENDED])
        for pool in POOLS:
            for one in snapshot[f"{pool}_fpm_snapshots"]:
                key = (pool, one["worker_id"])
                if self._known.get(key) != one:
                    self._known[key] = one
                    tokens = one["sum_prefill_tokens"]
                    seen["passes"].append([*key, tokens, one["wall_time"]])

    def _last(self, snapshot: dict[str, Any], pool: str) -> list[dict[str, Any]]:
        """The last pass of every worker that serves; the hook forgets a pass once it has told it."""
        serving = {*snapshot[f"active_{pool}_ids"], *snapshot[f"draining_{pool}_ids"]}
        return [p for (of, n), p in self._known.items() if of == pool and n in serving]

    def finalize(self, *_: object) -> None:
        """Nothing is kept."""


def main() -> None:
    wanted = json.loads(Path(sys.argv[1]).read_text())
    steps, asked = wanted["targets"], wanted.get("planner")
    policy: Script | Piped | None = Script(steps) if steps else None
    if asked:
        # Whatever the simulator prints must not get into the pipe.
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        policy = Piped(asked["window_ms"], asked["tick_ms"], out)
    ttft_ms, itl_ms = wanted.get("slo") or (None, None)
    result = run_mocker_trace_replay(
        [wanted["trace"]],
        prefill_engine_args=wanted["prefill"],
        decode_engine_args=wanted["decode"],
        num_prefill_workers=wanted["fleet"][0],
        num_decode_workers=wanted["fleet"][1],
        router_mode="kv_router",
        trace_block_size=512,
        capture_per_request=True,
        scaling_policy=policy,
        sla_ttft_ms=ttft_ms,
        sla_itl_ms=itl_ms,
    )
    rows = sorted(result.per_request, key=lambda row: row["arrival_time_ms"])
    Path(sys.argv[2]).write_text(
        json.dumps(
            {
                "summary": result.summary,
                "requests": {name: [row[name] for row in rows] for name in COLUMNS},
            }
        )
    )


if __name__ == "__main__":
    main()
