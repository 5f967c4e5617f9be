"""docker-compose.yml is valid, and every command in it is understood by the program it starts."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from readyplane.core.errors import ReadyplaneError
from readyplane.kit.settings import ServiceSettings, parse_settings
from readyplane_planner.policy_file import load_policy
from tests import deploy_files
from tests.deploy_files import ROOT, Service

SERVICES = deploy_files.compose()
OURS = [s for s in SERVICES.values() if s.document.get("image", "").startswith("readyplane:")]
SETTINGS = {
    "readyplane_registry": ("readyplane_registry.__main__", "Settings"),
    "readyplane_router": ("readyplane_router.__main__", "RouterSettings"),
    "readyplane_planner": ("readyplane_planner.__main__", "Settings"),
    "readyplane_gateway": ("readyplane_gateway.settings", "GatewaySettings"),
}
# Told to every service for one list of variables, and of no use to an agent or the command.
SHARED = {"READYPLANE_GRPC_PORT", "READYPLANE_HTTP_PORT", "READYPLANE_HOST", "READYPLANE_LOG_LEVEL"}


def docker_compose() -> list[str]:
    own = ROOT / ".venv-compose/bin/docker-compose"
    if own.exists():
        return [str(own)]
    docker = shutil.which("docker")
    asked = [docker or "docker", "compose", "version"]
    if docker and subprocess.run(asked, check=False, capture_output=True).returncode == 0:
        return [docker, "compose"]
    pytest.skip("no Docker Compose here (`make check` fetches one where it can)")


def config(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*docker_compose(), "-f", str(deploy_files.COMPOSE_FILE), "config"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environment},
    )


def test_docker_compose_takes_it(tmp_path: Path) -> None:
    done = config(tmp_path, READYPLANE_TOKEN="secret")
    assert done.returncode == 0, done.stderr
    seen = yaml.safe_load(done.stdout)["services"]
    assert seen.keys() == SERVICES.keys()
    for name, service in SERVICES.items():
        if service.command:
            assert seen[name]["command"] == service.command, name


def test_it_wants_a_token(tmp_path: Path) -> None:
    done = config(tmp_path)
    assert done.returncode != 0
    assert "READYPLANE_TOKEN" in done.stderr


def test_everything_of_the_system_is_in_it() -> None:
    roles = [s.environment["READYPLANE_ROLE"] for s in OURS if s.is_worker]
    assert sorted(roles) == ["decode", "decode", "prefill", "prefill"]
    assert {s.module.removeprefix("readyplane_") for s in OURS if s.module} == {
        *("registry", "router", "planner", "gateway", "agent")
    }
    assert {"postgres", "redis", "prometheus", "grafana"} <= SERVICES.keys()


@pytest.mark.parametrize("service", OURS, ids=lambda s: s.name)
def test_its_command_line_and_variables_are_understood(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    given, known = parsed(service)
    for name, value in service.environment.items():
        field = name.removeprefix("READYPLANE_").lower()
        if name in SHARED and field not in known:
            continue
        assert field in known, f"{service.name}: nothing reads {name}"
        assert str(given.get(field, value)) == value, name


def parsed(service: Service) -> tuple[dict[str, Any], set[str]]:
    """What the program makes of it, and the names of all its settings."""
    if service.command[0] == "readyplane":
        return {}, command_variables(service.command[1:])
    if service.is_worker:
        from readyplane_agent.settings import HELP, parse

        settings = parse(service.command[3:], service.environment)
        return {name: getattr(settings, name) for name in HELP}, set(HELP)
    place, name = SETTINGS[service.module]
    cls: type[ServiceSettings] = getattr(importlib.import_module(place), name)
    found = parse_settings(cls, service.command[3:], service.module, "")
    return found.model_dump(), set(cls.model_fields)


def command_variables(words: list[str]) -> set[str]:
    """Parses a `readyplane` command without running it; the variables it may read."""
    import typer

    from readyplane_lab.cli.app import app
    from readyplane_lab.cli.where import Where

    command: Any = typer.main.get_command(app)
    context = command.make_context("readyplane", list(words), resilient_parsing=False)
    while getattr(command, "commands", None):
        name, command, rest = command.resolve_command(
            context, context._protected_args + context.args
        )
        context = command.make_context(name, rest, parent=context)
    return set(Where.__dataclass_fields__)


@pytest.mark.parametrize("module", SETTINGS)
def test_a_renamed_flag_would_be_noticed(module: str) -> None:
    place, name = SETTINGS[module]
    cls = getattr(importlib.import_module(place), name)
    with pytest.raises(ReadyplaneError):
        parse_settings(cls, ["--no-such-flag", "x"], module, "")


def test_addresses_are_those_of_services() -> None:
    for service in OURS:
        for name, value in service.environment.items():
            for host in re.findall(r"(?:@|//|^)([a-z][a-z0-9-]*):\d+", value):
                assert host in SERVICES, f"{service.name}: {name}={value}"
    for name in ("registry", "router", "gateway", "planner"):
        assert SERVICES[name].environment["READYPLANE_HOST"] == "0.0.0.0"
    for service in (s for s in OURS if s.is_worker):
        # What a worker binds is what it tells the others, so it has to be a name they can resolve.
        assert service.environment["READYPLANE_HOST"] == service.name
        assert service.document["hostname"] == service.name


def test_ports_are_published_on_loopback_only() -> None:
    for service in SERVICES.values():
        for port in service.document.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), f"{service.name}: {port}"


def test_only_services_that_keep_state_are_told_of_the_stores() -> None:
    told = {s.name for s in OURS if "READYPLANE_DATABASE_URL" in s.environment}
    assert told == {"registry", "router", "planner"}


def test_what_is_mounted_and_copied_exists() -> None:
    for service in SERVICES.values():
        for volume in service.document.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), volume
    dockerfile = ROOT / "deploy/Dockerfile"
    for line in dockerfile.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), line


def test_every_wait_is_for_something_that_can_happen() -> None:
    for service in SERVICES.values():
        waits = service.document.get("depends_on", {})
        for name, wait in waits.items() if isinstance(waits, dict) else []:
            other = SERVICES[name].document
            if wait["condition"] == "service_healthy":
                assert not other.get("healthcheck", {}).get("disable"), f"{service.name}: {name}"
                assert "healthcheck" in other
            else:
                assert other["restart"] == "no", f"{service.name}: {name} never completes"


def test_the_policy_is_one() -> None:
    policy = load_policy(ROOT / "deploy/policy.yaml")
    assert policy.model == "demo"
    worker = next(s for s in OURS if s.is_worker)
    assert f"--worker-class={policy.prefill.worker_class}" in worker.command


def test_prometheus_scrapes_every_process() -> None:
    document = yaml.safe_load((deploy_files.PROMETHEUS_DIR / "prometheus.yml").read_text())
    targets = {
        target
        for job in document["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == {f"{s.name}:7080" for s in OURS if s.name != "publish"}
