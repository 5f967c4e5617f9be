"""Runs Dynamo's simulator on one specification; a program of its own environment, not of ours.

Owns the call of the private module of `ai-dynamo-runtime` 1.6.1 (so: pinned), nothing else. The
specification and the result are JSON files, so that neither environment needs the other one:
`.venv-dynosim/bin/python bench/dynosim_replay.py SPECIFICATION RESULT`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found]

COLUMNS = ("ttft_ms", "itl_ms", "input_length", "output_length", "reused_input_tokens")


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


def main() -> None:
    wanted = json.loads(Path(sys.argv[1]).read_text())
    steps = wanted["targets"]
    result = run_mocker_trace_replay(
        [wanted["trace"]],
        prefill_engine_args=wanted["prefill"],
        decode_engine_args=wanted["decode"],
        num_prefill_workers=wanted["fleet"][0],
        num_decode_workers=wanted["fleet"][1],
        router_mode="kv_router",
        trace_block_size=512,
        capture_per_request=True,
        scaling_policy=Script(steps) if steps else None,
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
