"""The files of deploy/ as the deploy tests see them: compose services with their variables filled in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMPOSE_FILE = ROOT / "docker-compose.yml"
DASHBOARD_FILE = ROOT / "deploy/grafana/dashboards/readyplane.json"
PROMETHEUS_DIR = ROOT / "deploy/prometheus"
RULES_FILE = PROMETHEUS_DIR / "rules.yml"
REFERENCE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<how>[-?])(?P<text>[^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Service:
    """One service of the compose file."""

    name: str
    document: dict[str, Any]

    @property
    def command(self) -> list[str]:
        """Its command line; empty where the image's own is used."""
        return [str(word) for word in self.document.get("command", [])]

    @property
    def environment(self) -> dict[str, str]:
        """Its variables."""
        return {k: str(v) for k, v in self.document.get("environment", {}).items()}

    @property
    def module(self) -> str:
        """`readyplane_router` for `python -m readyplane_router …`, empty for anything else."""
        words = self.command
        return words[2] if words[:2] == ["python", "-m"] else ""

    @property
    def is_worker(self) -> bool:
        """An agent with its engine."""
        return self.module == "readyplane_agent"


def compose(given: dict[str, str] | None = None) -> dict[str, Service]:
    """Services by name; `given` are the shell's variables."""
    variables = {"READYPLANE_TOKEN": "a-token"} if given is None else given
    document = yaml.safe_load(COMPOSE_FILE.read_text())
    services = _filled(document["services"], variables)
    return {name: Service(name, service) for name, service in services.items()}


def _filled(value: Any, variables: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {k: _filled(v, variables) for k, v in value.items()}
    if isinstance(value, list):
        return [_filled(v, variables) for v in value]
    return REFERENCE.sub(lambda m: _one(m, variables), value) if isinstance(value, str) else value


def _one(match: re.Match[str], variables: dict[str, str]) -> str:
    found = variables.get(match["name"], "")
    if found or match["how"] == "-":
        return found or match["text"]
    raise KeyError(match["text"] or match["name"])
