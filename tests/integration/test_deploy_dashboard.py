"""A real Prometheus scrapes the running system; every panel of the dashboard has something to show.

Also here, because it looks at the same system: the catalogue of docs/metrics.md is what it exports.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from readyplane.kit.free_ports import free_ports
from tests.deploy_files import DASHBOARD_FILE, PROMETHEUS_DIR, ROOT
from tests.integration.conftest import FullStack

SCRAPE_S = 1
TRAFFIC_S = 15.0
READY_S_MAX = 90.0
AGREE_S_MAX = 60.0  # a worker may be draining when we look
SERVICES = ("registry", "router", "planner", "gateway")
# Queries that need an event which this system had no reason for; they are only parsed.
NEEDS_AN_EVENT = {
    ("Repairs", "A"): "no leg failed",
    ("Prefill start-up by segment", "B"): "no image is pulled on one machine",
    ("Decode start-up by segment", "B"): "no image is pulled on one machine",
    ("Prefill start-up by segment", "E"): "the demo's weights are mapped, not deserialised",
    ("Decode start-up by segment", "E"): "the demo's weights are mapped, not deserialised",
    ("Forecast coverage", "A"): "judged after some minutes only",
}


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server and the moment it began to scrape."""

    url: str
    begun_s: float

    def ask(self, path: str, **values: Any) -> Any:
        """The data of one answer of its API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=values, timeout=10.0)
        document = answer.json()
        assert document["status"] == "success", f"{values}: {document}"
        return document["data"]

    def values(self, expression: str) -> list[float]:
        """Every number that the expression had since the beginning; NaN is none."""
        now_s = time.time()
        found = self.ask(
            "query_range", query=expression, start=self.begun_s, end=now_s, step=SCRAPE_S
        )
        texts = [value for series in found["result"] for _, value in series["values"]]
        return [float(t) for t in texts if t != "NaN"]


def wait(holds: Any, limit_s: float, what: str) -> None:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            if holds():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    pytest.fail(f"{what} did not come within {limit_s:g} s")


@pytest.fixture(scope="module")
def scraping(
    full_stack: FullStack, prometheus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Our configuration with this system's addresses, and some traffic while it scrapes."""
    folder = tmp_path_factory.mktemp("prometheus")
    (port,) = free_ports("127.0.0.1", 1)
    document = yaml.safe_load((PROMETHEUS_DIR / "prometheus.yml").read_text())
    document["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    document["scrape_configs"] = document["scrape_configs"][:1]
    document["scrape_configs"][0]["static_configs"] = [
        {
            "targets": [getattr(full_stack.book, f"{name}_http").removeprefix("http://")],
            "labels": {"service": name},
        }
        for name in SERVICES
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(document))
    shutil.copy(PROMETHEUS_DIR / "rules.yml", folder)
    begun_s = time.time()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(prometheus), f"--config.file={folder}/prometheus.yml"),
                *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        server = Prometheus(f"http://127.0.0.1:{port}", begun_s)
        wait(
            lambda: httpx.get(f"{server.url}/-/ready").status_code == 200,
            READY_S_MAX,
            f"Prometheus ({folder}/log)",
        )
        tally = full_stack.drive(TRAFFIC_S, rate_rps=3.0)
        assert tally.ended == tally.sent > 10
        time.sleep(3 * SCRAPE_S)
        yield server
    finally:
        process.terminate()
        process.wait(10)


def queries() -> list[tuple[str, str, str]]:
    dashboard = json.loads(DASHBOARD_FILE.read_text())
    return [
        (panel["title"], target["refId"], target["expr"].replace("$model", ".+"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def test_every_service_is_scraped(scraping: Prometheus) -> None:
    found = scraping.ask("targets")["activeTargets"]
    assert {(t["labels"]["service"], t["health"]) for t in found} == {(n, "up") for n in SERVICES}


def test_every_panel_has_data(scraping: Prometheus) -> None:
    empty = {
        (title, ref): expression
        for title, ref, expression in queries()
        if not scraping.values(expression)
    }
    unexpected = {place: text for place, text in empty.items() if place not in NEEDS_AN_EVENT}
    assert not unexpected


def test_panels_show_what_the_system_says(scraping: Prometheus, full_stack: FullStack) -> None:
    """A panel that shows something else than the page would be worse than an empty one."""
    by_place = {(title, ref): text for title, ref, text in queries()}
    places = {
        (pool, key): by_place[f"{pool.capitalize()} workers", ref]
        for pool in ("prefill", "decode")
        for ref, key in (("A", "desired"), ("C", "ready"))
    }

    def same() -> bool:
        pools = full_stack.state()["pools"]
        return all(
            scraping.values(text)[-1] == pools[pool][key] for (pool, key), text in places.items()
        )

    wait(same, AGREE_S_MAX, "the same number of workers in state and panels")
    state = full_stack.state()
    arrivals = scraping.ask("query", query="sum(readyplane_router_arrivals_total)")["result"]
    assert float(arrivals[0]["value"][1]) >= state["counters"]["arrivals"] > 0
    target = scraping.values(by_place["TTFT: actual, predicted, target", "D"])
    assert set(target) == {state["slo"]["ttft_s"]}


def test_rules_are_evaluated_and_nothing_is_on_fire(scraping: Prometheus) -> None:
    groups = scraping.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 15
    assert not [f"{r['name']}: {r.get('lastError')}" for r in rules if r["health"] == "err"]
    critical = [
        r["name"]
        for r in rules
        if r.get("state") == "firing" and r["labels"]["severity"] == "critical"
    ]
    assert not critical
    assert scraping.values("readyplane:attainment:ratio_rate5m")


# ------------------------------------------------------------------------ the catalogue of metrics

ROW = re.compile(r"^\| `(?P<name>[a-z_:]+)` \| (?P<type>\w+) \| (?P<labels>[^|]*) \| [^|]+ \|$")


STAGED = re.compile(r"readyplane_agent_(graph_\w+|upgrades_total)$")


def catalogue() -> dict[str, dict[str, tuple[str, frozenset[str]]]]:
    """Section -> metric -> (type, labels), from docs/metrics.md."""
    found: dict[str, dict[str, tuple[str, frozenset[str]]]] = {}
    section = ""
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].strip().lower()
        elif match := ROW.match(line):
            labels = frozenset(re.findall(r"`(\w+)`", match["labels"]))
            found.setdefault(section, {})[match["name"]] = (match["type"], labels)
    return found


def exported(text: str) -> dict[str, tuple[str, set[frozenset[str]]]]:
    """Metric -> (type, label sets of its samples); our own families only."""
    found: dict[str, tuple[str, set[frozenset[str]]]] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("readyplane_") or family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        extra = {"histogram": {"le"}, "summary": {"quantile"}}.get(family.type, set())
        labels = {
            frozenset(sample.labels) - extra
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        found[name] = (family.type, labels)
    return found


async def pages(full_stack: FullStack) -> dict[str, str]:
    """`/metrics` of every process of the system, by section of the catalogue."""
    book = full_stack.book
    urls = {name: getattr(book, f"{name}_http") for name in SERVICES}
    headers = {"authorization": f"Bearer {book.token}"}
    async with httpx.AsyncClient(headers=headers, timeout=10.0) as http:
        workers = (await http.get(f"{book.router_http}/v1/workers")).json()
        ready = next(w for w in workers["workers"] if w["state"] == "ready")
        urls |= {"agent": ready["offer"]["agent_url"], "engine": ready["serving"]["engine_url"]}
        answers = await asyncio.gather(*(http.get(f"{url}/metrics") for url in urls.values()))
        return {name: answer.text for name, answer in zip(urls, answers, strict=True)}


async def test_the_catalogue_is_what_is_exported(full_stack: FullStack) -> None:
    """But for what only a start in stages has: tests/unit/test_agent_upgrade.py sees that."""
    listed = catalogue()
    wrong: list[str] = []
    for section, text in (await pages(full_stack)).items():
        found = exported(text)
        wanted = {name for name in listed.get(section, {}) if not STAGED.match(name)}
        for name in sorted(found.keys() ^ wanted):
            where = "not in the catalogue" if name in found else "not exported"
            wrong.append(f"{section}: {name} is {where}")
        for name in sorted(found.keys() & listed.get(section, {}).keys()):
            kind, labels = listed[section][name]
            seen_kind, seen = found[name]
            if kind != seen_kind:
                wrong.append(f"{section}: {name} is a {seen_kind}, listed as {kind}")
            wrong += [
                f"{section}: {name} has labels {sorted(s)}" for s in seen if s and s != labels
            ]
    assert not wrong
