"""Whole groups move to another artifact and back, under traffic, ordered by nobody but the planner (R17.2).

A system of its own: its worker class has two GPUs, so that every worker is two rank processes.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from readyplane_lab.cli.__main__ import main
from readyplane_lab.up.traffic import Outcome, Tally
from tests.integration.conftest import READY_S_MAX, FullStack, _ready
from tests.integration.test_upgrade import said

if TYPE_CHECKING:
    from readyplane.core.worker import Worker

CLASS = "h200-slow10-tp2"
PROFILE = {"extends": "h200-slow10", "name": CLASS, "worker_class": CLASS, "gpus": 2}
PROMPT = [40, 41, 42, 43, 44, 45]
ENGINE = "readyplane_agent.engines.modelled"


class GroupStack(FullStack):
    """A running system whose workers are groups of two ranks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Any, folder: Path) -> None:
        super().__init__(loop, log)
        profile = folder / "tp2.json"
        profile.write_text(json.dumps(PROFILE))
        pool = {"worker_class": CLASS, "profile": str(profile), "min": 1, "max": 3}
        self.policy = folder / "policy.json"
        quick = {"verify_s": 2.0, "samples_min": 5}
        self.policy.write_text(
            json.dumps({"prefill": pool, "decode": pool, "min_ready_s": 1.0, "rollout": quick})
        )
        self.seen: dict[str, Worker] = {}
        self.sides: set[frozenset[int]] = set()
        self.pairs: set[tuple[str, str, str]] = set()
        self.lost: list[str] = []
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start everything and wait for a first pair; no trace is exported, and nothing scales."""
        from readyplane.kit.clock import SystemClock
        from readyplane_lab.up.options import UpOptions
        from readyplane_lab.up.stack import running_stack

        options = UpOptions(
            quick=True, load=False, model_bytes=20_000_000, policy_file=self.policy, workers_max=8
        )
        running = running_stack(options, clock=SystemClock(), say=self._say)
        self.stack = await self._rooms.enter_async_context(running)
        await self._until(_ready(1, 1), READY_S_MAX, "a first pair")
        self._watching = [asyncio.create_task(self._look()), asyncio.create_task(self._ask())]

    async def stop(self) -> None:
        """Stop everything."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await super().stop()

    async def _look(self) -> None:
        """Every worker that was ever there, and which generations served side by side."""
        from readyplane.client import RouterClient

        router = RouterClient(self.book.router, token=self.book.token)
        try:
            while True:
                fleet = await router.list_workers()
                self.seen |= fleet.workers
                ready = [w for w in fleet.workers.values() if str(w.state) == "ready"]
                self.sides.add(frozenset(w.offer.generation for w in ready))
                await asyncio.sleep(0.1)
        finally:
            await router.aclose()

    async def _ask(self) -> None:
        """One question again and again: which pair answered, and what."""
        import aiohttp

        body = {"model": self.book.model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            while True:
                url = f"{self.book.gateway_http}/v1/completions"
                async with session.post(url, json=body) as answer:
                    if answer.status != 200:
                        self.lost.append(f"{answer.status} {await answer.text()}")
                        continue
                    told = await answer.json()
                    pair = (
                        answer.headers["x-readyplane-prefill"],
                        answer.headers["x-readyplane-decode"],
                    )
                    self.pairs.add((*pair, told["choices"][0]["text"]))
                await asyncio.sleep(0.2)

    def digest(self, worker_id: str) -> str:
        return self.seen[worker_id].offer.manifest_digest


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupStack]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        made = GroupStack(loop, [].append, tmp_path_factory.mktemp("groups"))
        try:
            made.call(made.start(), limit_s=READY_S_MAX + 60.0)
            yield made
        finally:
            made.call(made.stop())
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10.0)
            loop.close()


def ranks_of(engine_id: str) -> dict[int, tuple[int, str]]:
    """Of each running rank process of an incarnation: its pid and the manifest it was started with."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if ENGINE in words and engine_id in words:
            flags = dict(pairwise(words))
            found[int(flags["--rank"])] = (process.pid, flags["--manifest-digest"])
    return found


def serving(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["worker_id"]: row for row in rows if row["state"] == "ready"}


class Load:
    """Requests that come while something else happens; none of them may be lost."""

    def __init__(self, groups: GroupStack, *, seed: int) -> None:
        self.told: list[Tally] = []
        drive = lambda: self.told.append(groups.drive(12.0, rate_rps=2.0, seed=seed))
        self._thread = threading.Thread(target=drive)
        self._groups = groups

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._thread.join(100.0)
        if error[0] is None:
            assert set(self.told[0].outcomes) == {Outcome.FINISHED}, self.told[0].complaints
            assert self._groups.lost == []


def no_pair_is_mixed(groups: GroupStack, digests: set[str]) -> None:
    """Every answer came from a pair of one artifact, and is the one that this artifact gives."""
    answers: dict[str, set[str]] = defaultdict(set)
    for prefill, decode, text in groups.pairs:
        assert groups.digest(prefill) == groups.digest(decode), (prefill, decode)
        answers[groups.digest(prefill)].add(text)
    assert set(answers) == digests
    assert all(len(texts) == 1 for texts in answers.values()), answers
    assert len({text for texts in answers.values() for text in texts}) == len(digests)


def of_one_artifact(capfd: pytest.CaptureFixture[str], digest: str) -> None:
    """Whoever serves is a group of two processes, both started with this artifact."""
    rows = serving(said(capfd, "workers")["workers"])
    assert {row["role"] for row in rows.values()} == {"prefill", "decode"}
    for name, row in rows.items():
        assert [rank["step"] for rank in row["ranks"]] == ["canary_passed"] * 2, row
        ranks = ranks_of(row["incarnation"])
        assert {rank: found for rank, (_, found) in ranks.items()} == {0: digest, 1: digest}, name


def test_groups_move_to_another_artifact(
    groups: GroupStack, capfd: pytest.CaptureFixture[str]
) -> None:
    old = said(capfd, "rollout", "status")["serves"]["digest"]
    of_one_artifact(capfd, old)
    publish = ("artifact", "publish", "--demo", "--model-mb", "24", "--tag", "demo:next")
    new = said(capfd, *publish)["digest"]
    with Load(groups, seed=9):
        assert main(["rollout", "--to", "demo:next", "--watch"]) == 0, capfd.readouterr()
        of_one_artifact(capfd, new)
    no_pair_is_mixed(groups, {old, new})
    assert any(len(side) > 1 for side in groups.sides), "the generations never served side by side"
    assert all(worker.offer.ranks == 2 for worker in groups.seen.values())


def test_and_back(groups: GroupStack, capfd: pytest.CaptureFixture[str]) -> None:
    new = said(capfd, "rollout", "status")["serves"]["digest"]
    old = next(d for w in groups.seen.values() if (d := w.offer.manifest_digest) != new)
    with Load(groups, seed=10):
        assert main(["rollout", "undo", "--watch"]) == 1, "a watch says that it was not done"
        assert "rolled_back" in capfd.readouterr().out
        of_one_artifact(capfd, old)
    no_pair_is_mixed(groups, {old, new})
    assert said(capfd, "rollout", "status")["serves"]["digest"] == old


def test_a_group_that_lost_a_rank_is_replaced(
    groups: GroupStack, capfd: pytest.CaptureFixture[str]
) -> None:
    """The planner orders a new worker, with a new group; the one that lost its rank never serves again."""
    rows = serving(said(capfd, "workers")["workers"])
    victim = next(name for name, row in sorted(rows.items()) if row["role"] == "decode")
    pid, _ = ranks_of(rows[victim]["incarnation"])[1]
    psutil.Process(pid).kill()
    deadline_s = time.monotonic() + 60.0
    while True:
        now = serving(said(capfd, "workers")["workers"])
        fresh = [n for n, row in now.items() if row["role"] == "decode" and n not in rows]
        if victim not in now and fresh:
            break
        assert time.monotonic() < deadline_s, now
        time.sleep(0.3)
    assert ranks_of(rows[victim]["incarnation"]) == {}
    assert set(ranks_of(now[fresh[0]]["incarnation"])) == {0, 1}
