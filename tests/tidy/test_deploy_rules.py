"""Prometheus's rules and Grafana's dashboard: well formed, tried, explained, and of metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy_files import DASHBOARD_FILE, PROMETHEUS_DIR, ROOT, RULES_FILE

GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"]
ALERTS = {r["alert"]: r for group in GROUPS for r in group["rules"] if "alert" in r}
RECORDED = {r["record"] for group in GROUPS for r in group["rules"] if "record" in r}
TESTS = sorted((PROMETHEUS_DIR / "tests").glob("*.yml"))
DASHBOARD: dict[str, Any] = json.loads(DASHBOARD_FILE.read_text())
PANELS = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
QUERIES = [(p["title"], t["refId"], t["expr"]) for p in PANELS for t in p["targets"]]
METRIC = re.compile(r"\breadyplane_[a-z0-9_]+")
OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")

# The part of Grafana's dashboard schema that a broken export breaks.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time", "refresh"],
    "properties": {
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
        "id": {"type": "null"},
        "schemaVersion": {"type": "integer", "minimum": 39},
        "panels": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/panel"}},
        "templating": {
            "type": "object",
            "properties": {
                "list": {"type": "array", "items": {"required": ["name", "type", "query"]}}
            },
        },
    },
    "$defs": {
        "panel": {
            "type": "object",
            "required": ["id", "type", "title", "gridPos"],
            "properties": {
                "id": {"type": "integer", "minimum": 1},
                "type": {"enum": ["row", "timeseries", "stat"]},
                "title": {"type": "string", "minLength": 3},
                "gridPos": {
                    "type": "object",
                    "required": ["h", "w", "x", "y"],
                    "properties": {
                        "h": {"type": "integer", "minimum": 1},
                        "w": {"type": "integer", "minimum": 1, "maximum": 24},
                        "x": {"type": "integer", "minimum": 0, "maximum": 23},
                        "y": {"type": "integer", "minimum": 0},
                    },
                },
                "datasource": {"$ref": "#/$defs/datasource"},
                "targets": {"type": "array", "items": {"$ref": "#/$defs/target"}, "minItems": 1},
            },
            "if": {"properties": {"type": {"const": "row"}}},
            "else": {
                "required": ["datasource", "targets", "description", "fieldConfig", "options"],
                "properties": {"description": {"minLength": 20}},
            },
        },
        "datasource": {
            "type": "object",
            "required": ["type", "uid"],
            "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
        },
        "target": {
            "type": "object",
            "required": ["refId", "expr", "datasource", "legendFormat"],
            "properties": {
                "refId": {"type": "string", "pattern": "^[A-Z]$"},
                "expr": {"type": "string", "minLength": 3},
                "datasource": {"$ref": "#/$defs/datasource"},
            },
        },
    },
}


def promtool_says(promtool: Path, *words: str) -> str:
    done = subprocess.run([str(promtool), *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_rules_and_configuration(promtool: Path) -> None:
    promtool_says(promtool, "check", "rules", str(RULES_FILE))
    promtool_says(promtool, "check", "config", str(PROMETHEUS_DIR / "prometheus.yml"))


@pytest.mark.parametrize("file", TESTS, ids=lambda p: p.name)
def test_the_rules_do_what_their_tests_say(promtool: Path, file: Path) -> None:
    promtool_says(promtool, "test", "rules", str(file))


def test_a_wrong_expectation_is_noticed(promtool: Path, tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    wrong = (PROMETHEUS_DIR / "tests/recorded.yml").read_text().replace("value: 0.75", "value: 0.7")
    (tmp_path / "t.yml").write_text(wrong.replace("../rules.yml", str(RULES_FILE)))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool_says(promtool, "test", "rules", str(tmp_path / "t.yml"))


def test_every_alert_is_tried_both_ways() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for file in TESTS:
        for test in yaml.safe_load(file.read_text())["tests"]:
            for alert in test.get("alert_rule_test", []):
                (fires if alert["exp_alerts"] else silent).add(alert["alertname"])
    assert fires == silent == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"warning", "critical"}
    notes = alert["annotations"]
    assert notes["summary"] and notes["description"].endswith(".")
    page, _, anchor = notes["runbook_url"].partition("#")
    text = (ROOT / page).read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert anchor in {h.lower().replace(" ", "-") for h in headings}, f"{page} has no {anchor}"
    section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
    assert "Look at" in section and "Do" in section, f"{page}: {name} says too little"


def test_the_dashboard_fits_the_schema() -> None:
    jsonschema.validate(DASHBOARD, SCHEMA)
    ids = [p["id"] for p in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        refs = [t["refId"] for t in panel["targets"]]
        assert len(refs) == len(set(refs)), panel["title"]
    titles = [p["title"] for p in DASHBOARD["panels"]]
    assert len(titles) == len(set(titles))


def test_no_panel_lies_over_another() -> None:
    boxes = {p["title"]: p["gridPos"] for p in DASHBOARD["panels"]}
    for (name, a), (other, b) in combinations(boxes.items(), 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{name} and {other}"
        assert a["x"] + a["w"] <= 24, name


def test_variables_are_declared() -> None:
    known = {v["name"] for v in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps([p["targets"] for p in PANELS])))
    assert used <= known


def test_the_dashboard_is_provisioned_where_compose_mounts_it() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    sources = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    provider = yaml.safe_load((folder / "dashboards/readyplane.yml").read_text())["providers"][0]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = [v.split(":")[:2] for v in compose["grafana"]["volumes"]]
    assert ["./deploy/grafana/dashboards", provider["options"]["path"]] in mounts
    assert ["./deploy/grafana/provisioning", "/etc/grafana/provisioning"] in mounts
    given = next(v for v in DASHBOARD["templating"]["list"] if v["name"] == "datasource")
    assert sources[0]["uid"] == given["current"]["value"]
    assert sources[0]["url"] == "http://prometheus:9090"


def catalogue() -> set[str]:
    """Metric names of docs/metrics.md, without the suffixes that Prometheus adds."""
    text = (ROOT / "docs/metrics.md").read_text()
    return set(re.findall(r"^\| `(readyplane_[a-z0-9_]+)`", text, re.MULTILINE))


def names_in(expression: str) -> set[str]:
    known = catalogue()
    found = set()
    for name in METRIC.findall(expression):
        found.add(name if name in known else OF_HISTOGRAMS.sub("", name))
    return found


@pytest.mark.parametrize(("title", "ref", "expression"), QUERIES, ids=lambda v: str(v)[:40])
def test_panels_ask_for_metrics_that_are_documented(title: str, ref: str, expression: str) -> None:
    del ref
    assert names_in(expression) <= catalogue(), title


def test_rules_ask_for_metrics_that_are_documented() -> None:
    expressions = " ".join(r["expr"] for group in GROUPS for r in group["rules"])
    assert names_in(re.sub(r"readyplane:\S+", "", expressions)) <= catalogue()
    assert set(re.findall(r"readyplane:[a-z0-9_:]+", expressions)) <= RECORDED


def test_metrics_of_two_services_are_told_apart() -> None:
    """Planner and router both export these; a query that mixes them would be wrong by half."""
    both = {
        *("readyplane_prefill_queue_tokens", "readyplane_decode_active_sequences"),
        *("readyplane_kv_usage_ratio", "readyplane_ttft_actual_seconds"),
        *("readyplane_ttft_predicted_seconds", "readyplane_tpot_actual_seconds"),
        "readyplane_tpot_predicted_seconds",
    }
    rules = [(r.get("alert", ""), "", r["expr"]) for group in GROUPS for r in group["rules"]]
    for title, _ref, expression in [*QUERIES, *rules]:
        for name, labels in re.findall(r"(readyplane_[a-z_]+)\{([^}]*)\}", expression):
            assert name not in both or 'service="' in labels, f"{title}: {name}"
        bare = set(re.findall(r"(readyplane_[a-z_]+)(?![a-z_{])", expression))
        assert not bare & both, title
