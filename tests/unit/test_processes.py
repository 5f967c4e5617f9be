"""Children are known by identity: what is ours is ended, what is not ours is never touched."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from readyplane.core.errors import Conflict, NotFound, Unavailable
from readyplane_lab.up import processes
from readyplane_lab.up.pids import (
    RUN_VARIABLE,
    carriers,
    descendants,
    holders,
    signal_exactly,
    start_mark,
)
from readyplane_lab.up.processes import Account, ProcessTable, file_tail, write_atomically
from readyplane_lab.up.reaping import reap

SLEEP = ["sleep", "60"]
ENV = {"PATH": os.defpath}


@pytest.fixture
async def table(tmp_path: Path) -> AsyncIterator[ProcessTable]:
    async with ProcessTable(tmp_path / "run") as table:
        yield table


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no table has started."""
    popen = subprocess.Popen(SLEEP, env=ENV)
    yield popen
    popen.kill()
    popen.wait()


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


async def until(condition: object, within_s: float = 10.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    return start_mark(pid) is not None


def stored(run_dir: Path) -> list[dict[str, object]]:
    """The processes of the only table, as they are on disk."""
    (path,) = run_dir.glob("processes-*.json")
    entries: list[dict[str, object]] = json.loads(path.read_text())["processes"]
    return entries


def orphan(run_dir: Path, **changes: object) -> None:
    """As if the supervisor that wrote the table had been killed."""
    (path,) = run_dir.glob("processes-*.json")
    gone = {"pid": 2**22 - 1, "start_mark": "gone"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "supervisor": gone, **changes}))


# -- identity -------------------------------------------------------------------------------------


def test_a_start_mark_tells_one_life_of_a_pid(stranger: subprocess.Popen[bytes]) -> None:
    first, second = start_mark(os.getpid()), start_mark(os.getpid())
    assert first is not None and first == second
    assert first != start_mark(stranger.pid)


def test_nobody_has_no_start_mark() -> None:
    assert start_mark(2**22 - 1) is None


def test_a_zombie_does_not_live_but_can_be_identified() -> None:
    popen = subprocess.Popen(["true"], env=ENV)
    os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
    assert start_mark(popen.pid) is None
    assert start_mark(popen.pid, or_zombie=True) is not None
    popen.wait()
    assert start_mark(popen.pid, or_zombie=True) is None


def test_a_signal_needs_the_right_mark(stranger: subprocess.Popen[bytes]) -> None:
    mark = start_mark(stranger.pid)
    assert mark is not None
    assert not signal_exactly(stranger.pid, mark + "0", signal.SIGKILL)
    assert stranger.poll() is None
    assert signal_exactly(stranger.pid, mark, signal.SIGKILL)
    assert stranger.wait(10) == -signal.SIGKILL
    assert not signal_exactly(stranger.pid, mark, signal.SIGKILL)


def test_without_pidfd_a_signal_still_needs_the_right_mark(
    stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    mark = start_mark(stranger.pid)
    assert mark is not None
    assert not signal_exactly(stranger.pid, mark + "0", signal.SIGKILL)
    assert signal_exactly(stranger.pid, mark, signal.SIGKILL)
    assert stranger.wait(10) == -signal.SIGKILL


def test_holders_of_a_file_are_found(tmp_path: Path) -> None:
    path = tmp_path / "held"
    with path.open("w") as file:
        popen = subprocess.Popen(SLEEP, env=ENV, stdout=file)
        assert {pid for pid, _ in holders(path)} == {popen.pid}, "and never ourselves"
    popen.kill()
    popen.wait()


# -- starting -------------------------------------------------------------------------------------


async def test_a_start_is_on_disk(table: ProcessTable, tmp_path: Path) -> None:
    pid = await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    (entry,) = stored(table.run_dir)
    assert entry["name"] == "a" and entry["pid"] == pid
    assert entry["start_mark"] == start_mark(pid)
    assert entry["log_path"] == str(tmp_path / "a.log")
    assert "sleep" not in json.dumps(entry["argv_digest"])
    (path,) = table.run_dir.glob("*")
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_child_leads_its_own_session_and_carries_the_run(
    table: ProcessTable, tmp_path: Path
) -> None:
    pid = await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert carriers({table.run_id}) == {(pid, start_mark(pid))}
    assert carriers({"another"}) == set()


async def test_a_child_inherits_no_descriptors(table: ProcessTable, tmp_path: Path) -> None:
    read, write = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        os.set_inheritable(write, True)
        code = (
            "import os; there = '/proc/self/fd/'\n"
            "print(sorted(int(n) for n in os.listdir(there) if os.path.exists(there + n)))"
        )
        await table.spawn("none", python(code), ENV, tmp_path / "none.log")
        await table.spawn("one", python(code), ENV, tmp_path / "one.log", pass_fds=(read,))
        assert await table.wait("none") == await table.wait("one") == 0
    os.close(read)
    os.close(write)
    assert table.log_tail("none") == "[0, 1, 2]"
    assert table.log_tail("one") == str([0, 1, 2, read])


async def test_stdin_is_a_text_or_empty(table: ProcessTable, tmp_path: Path) -> None:
    await table.spawn("text", ["cat"], ENV, tmp_path / "text.log", stdin_text="secret\n")
    await table.spawn("empty", ["cat"], ENV, tmp_path / "empty.log")
    assert await table.wait("text") == await table.wait("empty") == 0
    assert (table.log_tail("text"), table.log_tail("empty")) == ("secret", "")


async def test_a_name_runs_once(table: ProcessTable, tmp_path: Path) -> None:
    await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    with pytest.raises(Conflict, match="process a"):
        await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    await table.stop("a")
    await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    assert table.returncode("a") is None


async def test_a_program_that_is_missing_is_named(table: ProcessTable, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="/no/such/program"):
        await table.spawn("a", ["/no/such/program"], ENV, tmp_path / "a.log")
    assert table.running() == () and stored(table.run_dir) == []
    (path,) = table.run_dir.glob("processes-*.json")
    assert json.loads(path.read_text())["starting"] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a child as another user")
async def test_a_child_of_another_account_is_not_forked_off_this_process(
    table: ProcessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of a process with gRPC's threads may die; `subprocess` forks for these words alone."""
    forks = {"user", "group", "extra_groups", "preexec_fn", "umask"}
    really, given = subprocess.Popen, set[str]()

    def watched(*words: object, **more: object) -> subprocess.Popen[bytes]:
        given.update(more)
        return really(*words, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", watched)
    log, account = tmp_path / "log", Account(65_534, 65_534)
    await table.spawn("it", ["id"], ENV, log, account=account)
    await until(lambda: table.returncode("it") is not None)
    assert "uid=65534" in log.read_text()
    assert "gid=65534" in log.read_text()
    assert "0(root)" not in log.read_text()
    assert not forks & given
    with pytest.raises(Unavailable, match="no program nowhere"):
        await table.spawn("none", ["nowhere"], ENV, log, account=account)


async def test_a_start_that_cannot_be_recorded_leaves_nobody(
    table: ProcessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def full(path: Path, text: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        write_atomically(path, text)

    monkeypatch.setattr(processes, "write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    assert table.running() == () and carriers({table.run_id}) == set()


async def test_a_closed_table_starts_nothing(tmp_path: Path) -> None:
    table = ProcessTable(tmp_path)
    await table.close()
    with pytest.raises(Unavailable, match="the run is ending"):
        await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")


# -- ending ---------------------------------------------------------------------------------------


async def test_an_end_that_nobody_asked_for_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    async with ProcessTable(tmp_path, on_exit=lambda *end: told.append(end)) as table:
        await table.spawn("ends", python("raise SystemExit(3)"), ENV, tmp_path / "a.log")
        await table.spawn("asked", SLEEP, ENV, tmp_path / "b.log")
        killed = await table.spawn("killed", SLEEP, ENV, tmp_path / "c.log")
        os.kill(killed, signal.SIGKILL)
        assert await table.wait("ends") == 3
        assert await table.wait("killed") == -signal.SIGKILL
        assert await table.stop("asked") == -signal.SIGTERM
        assert sorted(told) == [("ends", 3), ("killed", -9)]
        assert stored(tmp_path) == []
    assert list(tmp_path.glob("*.json")) == []


async def test_without_pidfd_an_end_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    async with ProcessTable(tmp_path) as table:
        await table.spawn("a", python("raise SystemExit(3)"), ENV, tmp_path / "a.log")
        await table.spawn("b", SLEEP, ENV, tmp_path / "b.log")
        assert await table.wait("a") == 3
        assert await table.stop("b") == -signal.SIGTERM


async def test_stop_may_be_called_again_and_for_nobody(table: ProcessTable, tmp_path: Path) -> None:
    await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    assert set(await asyncio.gather(table.stop("a"), table.stop("a"))) == {-15}
    assert await table.stop("a") == -15
    assert await table.stop("never") is None
    assert await table.wait("a") == -15
    with pytest.raises(NotFound, match="never"):
        await table.wait("never")


async def test_the_stop_signal_is_the_childs_own(table: ProcessTable, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        "print('on', flush=True); time.sleep(60)"
    )
    await table.spawn("a", python(code), ENV, tmp_path / "a", stop_signal=signal.SIGINT)
    await until(lambda: table.log_tail("a") == "on")
    assert await table.stop("a") == 7


STUBBORN = (
    "import signal, subprocess, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "away = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    "near = subprocess.Popen(['sleep', '60'])\n"
    "print(away.pid, near.pid, flush=True); time.sleep(60)"
)


async def test_a_stubborn_family_is_killed(table: ProcessTable, tmp_path: Path) -> None:
    pid = await table.spawn("a", python(STUBBORN), ENV, tmp_path / "a.log")
    await until(lambda: table.log_tail("a"))
    family = {int(word) for word in table.log_tail("a").split()}
    assert {each for each, _ in descendants(pid)} == family
    assert await table.stop("a", grace_s=0.1) == -signal.SIGKILL
    await until(lambda: not any(map(lives, family)))


async def test_a_cancelled_stop_kills_at_once(table: ProcessTable, tmp_path: Path) -> None:
    pid = await table.spawn("a", python(STUBBORN), ENV, tmp_path / "a.log")
    await until(lambda: table.log_tail("a"))
    family = {int(word) for word in table.log_tail("a").split()}
    stopping = asyncio.create_task(table.stop("a", grace_s=60))
    await asyncio.sleep(0.05)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not lives(pid)
    await until(lambda: not any(map(lives, family)))


async def test_a_leader_that_ends_takes_its_group_along(
    table: ProcessTable, tmp_path: Path
) -> None:
    await table.spawn("a", ["sh", "-c", "sleep 60 & echo $!"], ENV, tmp_path / "a.log")
    assert await table.wait("a") == 0
    left = int(table.log_tail("a"))
    await until(lambda: not lives(left))


async def test_close_finds_who_left_the_group(tmp_path: Path) -> None:
    table = ProcessTable(tmp_path)
    await table.spawn("a", ["sh", "-c", "setsid sleep 60 & echo $!"], ENV, tmp_path / "a.log")
    assert await table.wait("a") == 0
    await table.close()
    assert carriers({table.run_id}) == set()
    await table.close()


# -- what an earlier run left ---------------------------------------------------------------------


async def test_the_left_are_ended(table: ProcessTable, tmp_path: Path) -> None:
    await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    pid = await table.spawn("b", python(STUBBORN), ENV, tmp_path / "b.log")
    await until(lambda: table.log_tail("b"))
    family = {pid, *(int(word) for word in table.log_tail("b").split())}
    orphan(table.run_dir)
    assert await reap(table.run_dir, grace_s=0.2) == ("a", "b")
    assert not any(map(lives, family))
    assert list(table.run_dir.iterdir()) == []
    assert await reap(table.run_dir) == ()
    assert await reap(tmp_path / "absent") == ()


async def test_a_pid_that_was_reused_is_not_killed(
    table: ProcessTable, tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    await asyncio.sleep(0.03)  # a start tick is 10 ms
    await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    (entry,) = stored(table.run_dir)
    await table.stop("a")
    orphan(table.run_dir, processes=[{**entry, "pid": stranger.pid}])
    assert await reap(table.run_dir) == ()
    assert stranger.poll() is None


async def test_one_that_was_not_recorded_is_known_by_its_run(tmp_path: Path) -> None:
    """The supervisor was killed between starting it and writing it down."""
    table = ProcessTable(tmp_path)
    await table.spawn("a", ["true"], ENV, tmp_path / "a.log")
    await table.wait("a")
    lost = subprocess.Popen(SLEEP, env={**ENV, RUN_VARIABLE: table.run_id})
    orphan(tmp_path)
    try:
        assert await reap(tmp_path) == ()
        assert lost.wait(10) == -signal.SIGKILL
    finally:
        lost.kill()
        lost.wait()


async def test_one_that_was_just_being_started_is_looked_for_again(tmp_path: Path) -> None:
    """Until its exec it shows its parent's environment, and cannot be known."""
    table = ProcessTable(tmp_path)
    await table.spawn("a", ["true"], ENV, tmp_path / "a.log")
    await table.wait("a")
    orphan(tmp_path, starting=str(tmp_path / "b.log"))
    script = f"sleep 0.3; {RUN_VARIABLE}={table.run_id} exec sleep 60"
    late = subprocess.Popen(["sh", "-c", script], env=ENV)
    try:
        assert await reap(tmp_path) == ()
        assert late.wait(10) == -signal.SIGKILL
    finally:
        late.kill()
        late.wait()


async def test_one_that_hides_its_environment_is_known_by_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valkey and Postgres write their title over it; who reads the log is not one of them."""
    table = ProcessTable(tmp_path)
    await table.spawn("a", ["true"], ENV, tmp_path / "a.log")
    await table.wait("a")
    monkeypatch.setattr("readyplane_lab.up.reaping.STARTING_S", 0.1)
    orphan(tmp_path, starting=str(tmp_path / "b.log"))
    (tmp_path / "b.log").touch()
    with (tmp_path / "b.log").open("ab") as written, (tmp_path / "b.log").open("rb") as read:
        hidden = subprocess.Popen(SLEEP, env={}, executable="/bin/sleep", stdout=written)
        reader = subprocess.Popen(SLEEP, env={}, executable="/bin/sleep", stdin=read, stdout=read)
    try:
        assert await reap(tmp_path) == ()
        assert hidden.wait(10) == -signal.SIGKILL
        assert reader.poll() is None
    finally:
        for popen in (hidden, reader):
            popen.kill()
            popen.wait()


async def test_the_children_of_a_living_supervisor_are_left_alone(
    table: ProcessTable, tmp_path: Path
) -> None:
    pid = await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    assert await reap(table.run_dir) == ()
    assert lives(pid) and stored(table.run_dir)


async def test_a_dying_supervisor_is_waited_for(
    table: ProcessTable, tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    """Its lock and its pipes are gone a moment before it is seen dead."""
    pid = await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    dying = {"pid": stranger.pid, "start_mark": start_mark(stranger.pid)}
    orphan(table.run_dir, supervisor=dying)
    asyncio.get_running_loop().call_later(0.1, stranger.kill)
    assert await reap(table.run_dir) == () and lives(pid)
    assert await reap(table.run_dir, dying_s=10) == ("a",) and not lives(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's file")
async def test_a_table_of_another_user_is_not_believed(
    table: ProcessTable, tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    await table.spawn("a", SLEEP, ENV, tmp_path / "a.log")
    (entry,) = stored(table.run_dir)
    named = {**entry, "pid": stranger.pid, "start_mark": start_mark(stranger.pid)}
    orphan(table.run_dir, processes=[named])
    (path,) = table.run_dir.glob("*.json")
    os.chown(path, 65534, 65534)
    assert await reap(table.run_dir) == ()
    assert stranger.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"supervisor": 1}', '{"format": 9}'])
async def test_a_table_that_cannot_be_read_is_dropped(tmp_path: Path, text: str) -> None:
    (tmp_path / "processes-x.json").write_text(text)
    assert await reap(tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


# -- logs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, lines, tail",
    [
        (b"", 3, ""),
        (b"a\nb\nc\n", 2, "b\nc"),
        (b"a\nb", 5, "a\nb"),
        (b"a\nb", 0, ""),
        (b"\xff\n", 1, "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_the_tail_of_a_file(tmp_path: Path, text: bytes, lines: int, tail: str) -> None:
    path = tmp_path / "log"
    assert file_tail(path, lines) == ""
    path.write_bytes(text)
    assert file_tail(path, lines) == tail


async def test_a_log_is_appended_to_and_turned_over(
    table: ProcessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "logs" / "a.log"
    for word in ("one", "two"):
        await table.spawn("a", ["echo", word], ENV, path)
        await table.wait("a")
    assert table.log_tail("a") == "one\ntwo" and table.log_tail("never") == ""
    monkeypatch.setattr(processes, "LOG_BYTES_MAX", 4)
    await table.spawn("a", ["echo", "three"], ENV, path)
    await table.wait("a")
    assert table.log_tail("a") == "three"
    assert path.with_name("a.log.1").read_text() == "one\ntwo\n"


def test_a_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
