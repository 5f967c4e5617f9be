"""How long NIXL's progress thread sleeps in a vLLM, with NIXL replaced by a double."""

import sys
import types
from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane_agent.engines.vllm_nixl import WAKE_ENV, let_sleep, wake_us

UTILS = "vllm.distributed.nixl_utils"
API = "nixl_double._api"


class AgentConfig:
    """As much of NIXL's settings as is changed: a delay [us] and something beside it."""

    def __init__(self) -> None:
        self._delay, self.listenPort = 7, 0

    @property
    def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
        return self._delay

    @pthrDelay.setter
    def pthrDelay(self, value: int) -> None:  # noqa: N802
        self._delay = value


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NIXL's compiled part, as its Python side holds it."""
    found = types.SimpleNamespace(nixlAgentConfig=AgentConfig)
    api = types.ModuleType(API)
    api.nixlBind = found  # type: ignore[attr-defined]
    utils = types.ModuleType(UTILS)
    utils.nixl_agent_config = type("nixl_agent_config", (), {"__module__": API})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, API, api)
    monkeypatch.setitem(sys.modules, UTILS, utils)
    return found


@pytest.mark.parametrize(
    ("environ", "device", "us"),
    [
        ({}, "cpu", 1000),
        ({}, "", 0),
        ({WAKE_ENV: "0"}, "cpu", 0),
        ({WAKE_ENV: "5000"}, "", 5000),
        ({WAKE_ENV: ""}, "cpu", 1000),
    ],
)
def test_how_long_it_sleeps(environ: dict[str, str], device: str, us: int) -> None:
    assert wake_us(environ, device=device) == us


@pytest.mark.parametrize("value", ["-1", "1ms", "1e3", "1000001", "²"])
def test_a_time_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidField, match=WAKE_ENV):
        wake_us({WAKE_ENV: value}, device="cpu")


def test_agents_made_from_now_on_sleep(bindings: Any) -> None:
    assert let_sleep(1000)
    made = bindings.nixlAgentConfig()
    made.pthrDelay = 0  # as NIXL's Python side does
    made.listenPort = 5
    assert made.pthrDelay == 1000
    assert isinstance(made, AgentConfig) and made.listenPort == 5
    made.pthrDelay = 4000
    assert made.pthrDelay == 4000, "one that sleeps longer is left to"
    once = bindings.nixlAgentConfig
    assert let_sleep(1000)
    assert bindings.nixlAgentConfig is once


def test_nothing_is_changed_unless_asked(bindings: Any) -> None:
    assert not let_sleep(0)
    assert bindings.nixlAgentConfig is AgentConfig


def test_a_nixl_that_is_otherwise_is_left_alone_and_that_is_said(
    bindings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(AgentConfig, "pthrDelay")
    assert not let_sleep(1000)
    assert bindings.nixlAgentConfig is AgentConfig
    assert "no nixlAgentConfig.pthrDelay" in capsys.readouterr().err
    monkeypatch.setattr(sys.modules[UTILS], "nixl_agent_config", None)  # NIXL is not installed
    assert not let_sleep(1000)
    monkeypatch.delitem(sys.modules, UTILS)
    assert not let_sleep(1000)
    assert "does not sleep" in capsys.readouterr().err
