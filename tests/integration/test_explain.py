"""A decision of a running system is explained across five services, taken again, and asked about."""

import json

import pytest

from readyplane_lab.cli.__main__ import main
from tests.integration.conftest import FullStack


def said(capfd: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    """The document of a command that finds the running system by itself."""
    capfd.readouterr()
    assert main([*argv, "--json"]) == 0, capfd.readouterr().err
    found = json.loads(capfd.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_decision_of_a_running_system(
    full_stack: FullStack, capfd: pytest.CaptureFixture[str]
) -> None:
    """R24.2: 'why did this take so long', also for workers that are gone; and the same again."""
    assert full_stack.state()["workers"]
    listed = said(capfd, "decisions", "--limit", "200")["decisions"]
    assert isinstance(listed, list)
    first = next(d for d in reversed(listed) if d["orders"])
    told = said(capfd, "explain", first["decision_id"])
    moments = told["timeline"]
    assert isinstance(moments, list)
    known = [m for m in moments if m["after_s"] is not None]
    assert {m["who"] for m in known} == {"planner", "actuator", "agent", "gate", "router"}
    steps = {m["what"] for m in known}
    assert {"order accepted", "allocated", "process runs", "lease granted"} <= steps
    assert {"canary", "registered, routable", "first request"} <= steps
    times = [m["after_s"] for m in known]
    assert times == sorted(times) and times[-1] < 600
    assert next(m["note"] for m in known if m["who"] == "gate").endswith("checks passed")
    for decision in listed[:5]:
        again = said(capfd, "explain", decision["decision_id"], "--replay")
        assert again["same"] is True, again["differences"]
    asked = said(capfd, "plan", "--what-if", "tready=3x,policy.headroom=0.5")
    what_if, as_is = asked["what_if"], asked["as_is"]
    assert isinstance(what_if, dict) and isinstance(as_is, dict)
    assert what_if["prefill"]["t_ready_p90_s"] == pytest.approx(
        3 * as_is["prefill"]["t_ready_p90_s"]
    )
