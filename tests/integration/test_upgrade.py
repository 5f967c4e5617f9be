"""Another revision takes over a running system, by the command, under traffic (R17.2).

Last of those who share the system: its workers are others afterwards.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from readyplane_lab.cli.__main__ import main
from readyplane_lab.up.traffic import Outcome, Tally
from tests.integration.conftest import FullStack

QUICK = ("rollout.verify_s=2", "rollout.samples_min=5", "min_ready_s=1.0")


def said(capfd: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The document of a command that finds the running system by itself."""
    capfd.readouterr()
    assert main([*argv, "--json"]) == 0, capfd.readouterr().err
    lines = capfd.readouterr().out
    found = json.loads(lines)
    assert isinstance(found, dict)
    return found


def test_a_roll_out_of_a_running_system(
    full_stack: FullStack, capfd: pytest.CaptureFixture[str]
) -> None:
    said(capfd, "policy", "set", *QUICK)
    published = said(
        capfd, "artifact", "publish", "--demo", "--model-mb", "20", "--tag", "demo:next"
    )
    new = published["digest"]
    before = said(capfd, "rollout", "status")
    assert before["phase"] == "idle"
    assert before["serves"]["digest"] != new
    old = {w["worker_id"] for w in said(capfd, "workers")["workers"]}
    told: list[Tally] = []
    traffic = threading.Thread(
        target=lambda: told.append(full_stack.drive(14.0, rate_rps=3.0, seed=9))
    )
    traffic.start()
    began_s = time.monotonic()
    assert main(["rollout", "--to", "demo:next", "--watch"]) == 0, capfd.readouterr()
    took_s = time.monotonic() - began_s
    out = capfd.readouterr().out
    assert out.index("surging: ") < out.index("moving: ") < out.index("done: ")
    after = said(capfd, "rollout", "status")
    assert after["serves"] == {"digest": new, "generation": 2}
    assert after["by"]
    rows = said(capfd, "workers")["workers"]
    serving = {w["worker_id"]: w["generation"] for w in rows if w["state"] == "ready"}
    assert set(serving.values()) == {2}
    assert not old & set(serving)
    traffic.join(120.0)
    assert set(told[0].outcomes) == {Outcome.FINISHED}, told[0].complaints
    assert took_s < 180.0
