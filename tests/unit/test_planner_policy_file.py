"""A policy file is hot: what is right comes into force, what is wrong is named and changes nothing."""

import os
from pathlib import Path
from threading import Event

import pytest
import yaml

from readyplane.core.errors import InvalidField, Unavailable
from readyplane_planner.policy import Policy
from readyplane_planner.policy_file import BYTES_MAX, PolicyFile, load_policy
from tests.unit.planner_world import HandClock, Run, World, planner, policy


def write(path: Path, **changes: object) -> None:
    path.write_text(yaml.safe_dump({**policy().document(), **changes}))


@pytest.fixture
async def run() -> Run:
    found = await planner(World(HandClock(), rps=lambda _t: 2.0))
    await found.step(5)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    write(path)
    return path


def watcher(run: Run, path: Path) -> PolicyFile:
    return PolicyFile(
        path,
        adopt=run.service.adopt,
        tell=run.service.tell_policy_error,
        clock=run.world.clock,
        every_s=2.0,
    )


async def degraded(run: Run) -> str:
    await run.step(1)
    return str((await run.service.state())["degraded"])


async def test_a_change_is_in_force_with_the_next_tick(run: Run, file: Path) -> None:
    watched = watcher(run, file)
    assert await watched.check() is False, "nothing has changed"
    write(file, headroom=0.4)
    assert await watched.check() is True
    found, version = await run.service.get_policy()
    assert (found["headroom"], version) == (0.4, 2)
    await run.step(1)
    assert run.decisions[-1].policy_version == 2
    os.utime(file)
    file.write_text("# a remark\n" + file.read_text())
    assert await watched.check() is True
    assert (await run.service.get_policy())[1] == 2, "the same policy is no new version"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: demo\nheadrom: 0.3\n", "policy.headrom"),
        ("model: demo\nheadroom: [", "write valid YAML"),
        ("model: demo\nprefill: {min: 9, max: 3}\n", "policy.prefill.min"),
        ("model: another\n", "this planner plans demo"),
    ],
)
async def test_a_wrong_file_is_named_and_the_last_good_policy_stays(
    run: Run, file: Path, text: str, words: str
) -> None:
    watched = watcher(run, file)
    before = await run.service.get_policy()
    file.write_text(text)
    assert await watched.check() is False
    assert await run.service.get_policy() == before
    told = await degraded(run)
    assert words in told and str(file) in told and "the last good policy stays" in told
    write(file, headroom=0.2)
    assert await watched.check() is True
    assert await degraded(run) == ""


async def test_a_file_that_is_gone_and_comes_back(run: Run, file: Path) -> None:
    watched = watcher(run, file)
    file.unlink()
    assert await watched.check() is False
    assert "give a readable file" in await degraded(run)
    write(file)
    assert await watched.check() is True
    assert await degraded(run) == ""


async def test_what_is_no_regular_file_is_named_and_holds_nobody_up(run: Run, file: Path) -> None:
    watched = watcher(run, file)
    for become, words in (
        (lambda: os.mkfifo(file), "give a regular file"),
        (lambda: file.symlink_to("/dev/zero"), "give a regular file"),
        (lambda: file.write_bytes(b"#" * (BYTES_MAX + 1)), "at most 1000000 bytes"),
    ):
        file.unlink()
        become()
        with pytest.raises(InvalidField, match=words):
            load_policy(file)
        assert await watched.check() is False
        assert words in await degraded(run)
    file.unlink()
    write(file, headroom=0.3)
    assert await watched.check() is True
    assert await degraded(run) == ""


async def test_a_mount_that_hangs_is_named_and_read_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted: list[Policy] = []

    async def adopt(wanted: Policy) -> None:
        adopted.append(wanted)

    told: list[str] = []
    watched = PolicyFile(
        file, adopt=adopt, tell=told.append, clock=HandClock(), every_s=1.0, read_s_max=0.02
    )
    answers, reads = Event(), []

    def hangs(fd: int) -> os.stat_result:
        reads.append(fd)
        answers.wait(10.0)
        return file.stat()

    with monkeypatch.context() as patched:
        patched.setattr("readyplane_planner.policy_file.os.fstat", hangs)
        write(file, headroom=0.3)
        assert [await watched.check() for _ in range(3)] == [False] * 3
        assert len(told) == 1 and "did not answer within 0.02 s" in told[0], "told once"
        assert len(reads) == 1, "nobody is sent after one who waits"
        answers.set()
        while not adopted:
            await watched.check()
    assert adopted[0].headroom == 0.3 and told[-1] == ""


async def test_a_store_that_is_away_is_tried_again(file: Path) -> None:
    asked: list[Policy] = []

    async def adopt(wanted: Policy) -> None:
        asked.append(wanted)
        if len(asked) == 1:
            raise Unavailable("the journal is away", "wait")

    told: list[str] = []
    watched = PolicyFile(file, adopt=adopt, tell=told.append, clock=HandClock(), every_s=1.0)
    write(file, headroom=0.3)
    assert [await watched.check() for _ in range(3)] == [False, True, False]
    assert len(asked) == 2 and "the journal is away" in told[0] and told[-1] == ""


async def test_another_planner_of_the_model_follows_and_may_be_told() -> None:
    """Two planners, one journal: whichever is told, both plan by the newest version."""
    run = await planner(World(HandClock()))
    other = await planner(World(run.world.clock), journal=run.journal)
    await run.step(2)
    await other.service.set_policy({"headroom": 0.7}, merge=True)
    await run.step(8)
    assert (await run.service.get_policy())[1] == 2
    await run.service.set_policy({"headroom": 0.6}, merge=True)
    stored = await other.service.set_policy({"tick_s": 1.5}, merge=True)
    assert stored[1] == 4 and stored[0]["headroom"] == 0.6, "no change of the other one is lost"
