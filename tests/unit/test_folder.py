"""The data folder: one layout, one holder, clear refusals, and nothing left of a temporary one."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField
from readyplane_lab.up import folder as module
from readyplane_lab.up.folder import (
    SUBFOLDERS,
    DataFolder,
    record_outside,
    remove_outside,
    sweep_abandoned,
)
from readyplane_lab.up.pids import start_mark

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class FixedClock:
    def monotonic_s(self) -> float:
        return 0.0

    def wall_s(self) -> float:
        return 1_700_000_000.0

    async def sleep(self, seconds: float) -> None:
        return None


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go, apart from those of a stack that really runs here."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def refused(path: Path) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        DataFolder.open(path)
    assert caught.value.field == "data_dir" and caught.value.value == str(path)
    assert caught.value.remedy and caught.value.remedy in str(caught.value)
    return caught.value


# -- layout ---------------------------------------------------------------------------------------


def test_a_new_folder_has_the_layout_and_is_closed_to_others(tmp_path: Path) -> None:
    with DataFolder.open(tmp_path / "deep" / "data", clock=FixedClock()) as folder:
        assert folder.path == tmp_path / "deep" / "data" and not folder.temporary
        assert json.loads((folder.path / "READYPLANE").read_text()) == {
            "format": 1,
            "created": "2023-11-14T22:13:20+00:00",
            "temporary": False,
        }
        named = [getattr(folder, name) for name in SUBFOLDERS]
        assert named == [folder.path / name for name in SUBFOLDERS]
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in (folder.path, *named))


def test_what_is_in_it_is_there_the_next_time(tmp_path: Path) -> None:
    with DataFolder.open(tmp_path / "data", clock=FixedClock()) as folder:
        (folder.blobs / "a").write_text("kept")
        written = (folder.path / "READYPLANE").read_text()
    with DataFolder.open(tmp_path / "data") as folder:
        assert (folder.blobs / "a").read_text() == "kept"
        assert (folder.path / "READYPLANE").read_text() == written


def test_a_mount_point_with_its_lost_and_found_is_empty(tmp_path: Path) -> None:
    (tmp_path / "data" / "lost+found").mkdir(parents=True)
    DataFolder.open(tmp_path / "data").close()


def test_a_first_start_that_was_killed_is_continued(tmp_path: Path) -> None:
    for name in ("pg", "run"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / "lock").touch()
    (tmp_path / "data" / ".READYPLANE.0a1b").touch()
    DataFolder.open(tmp_path / "data").close()
    assert (tmp_path / "data" / "READYPLANE").exists()


# -- refusals -------------------------------------------------------------------------------------


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not a folder" in str(refused(tmp_path / "file"))
    assert "is not a folder" in str(refused(tmp_path / "file" / "below"))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    assert "'thesis.tex' is in it" in str(refused(tmp_path / "home"))
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text", ['{"format": 2}', "{}", "", "[]", "not json"])
def test_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "READYPLANE").write_text(text)
    for _again in range(2):  # and a refusal lets go of the lock
        error = str(refused(tmp_path / "data"))
        assert "this version of Readyplane reads format 1" in error
    assert (tmp_path / "data" / "READYPLANE").read_text() == text


def test_a_folder_that_all_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o777)
    assert "chmod o-w" in str(refused(tmp_path / "data"))


@AS_ROOT
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.chown(tmp_path / "data", 65534, 65534)
    assert "belongs to user id 65534" in str(refused(tmp_path / "data"))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/proc/sys")  # root may write everywhere else
        with pytest.raises(InvalidField, match=r"cannot be (written|used)"):
            DataFolder.open(place / "data")
        return
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "cannot be written (Permission denied)" in str(refused(tmp_path / "closed"))
    assert "cannot be written (Permission denied)" in str(refused(tmp_path / "closed" / "below"))


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_atomically", full)
        assert "cannot be used (No space left on device)" in str(refused(tmp_path / "data"))
        with pytest.raises(InvalidField):
            DataFolder.open()
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    DataFolder.open(tmp_path / "data").close()


# -- one holder -----------------------------------------------------------------------------------


def test_a_second_holder_is_told_who_holds_it(tmp_path: Path) -> None:
    with DataFolder.open(tmp_path / "data"):
        assert f"in use by process {os.getpid()}" in str(refused(tmp_path / "data"))
    DataFolder.open(tmp_path / "data").close()


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path / "data")
    popen = subprocess.Popen(["sleep", "60"], close_fds=False)
    folder.close()
    DataFolder.open(tmp_path / "data").close()
    popen.kill()
    popen.wait()


def test_close_may_be_called_again(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path / "data")
    folder.close()
    with DataFolder.open(tmp_path / "data"):
        folder.close()
        refused(tmp_path / "data")


# -- temporary folders ----------------------------------------------------------------------------


def test_a_temporary_folder_goes_with_its_holder(temporary_files: Path) -> None:
    with DataFolder.open() as folder:
        assert folder.temporary and folder.path.parent == temporary_files
        (folder.blobs / "read-only").mkdir()
        (folder.blobs / "read-only" / "a").touch()
        (folder.path / "link").symlink_to(folder.blobs)
    assert list(temporary_files.iterdir()) == []


HOLDER = """
import asyncio, os, sys
from pathlib import Path
from readyplane_lab.up.folder import DataFolder, record_outside
from readyplane_lab.up.processes import ProcessTable

async def main(path, guarded):
    folder = DataFolder.open(Path(path) if path else None)
    if guarded:
        folder.guard()
    outside = Path(os.environ["TMPDIR"]) / "readyplane-outside"
    outside.mkdir()
    record_outside(folder.pg, outside)
    pids = []
    for place in (folder.run, folder.pg):
        table = ProcessTable(place)
        pids.append(await table.spawn("a", ["sleep", "60"], dict(os.environ), place / "a.log"))
    print(folder.path, *pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main(sys.argv[1], sys.argv[2] == "guarded"))
"""


def killed_holder(place: Path, path: str, guard: str) -> tuple[Path, list[int]]:
    """The folder and children of a supervisor that was killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path, guard],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    data, *pids = holder.stdout.readline().split()
    holder.stdout.close()
    children = [int(pid) for pid in pids]
    assert all(start_mark(pid) for pid in children)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    return Path(data), children


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        signal.sigtimedwait([], 0.01)
    raise AssertionError("not within 10 s")


async def test_abandoned_temporary_folders_are_swept(temporary_files: Path) -> None:
    data, children = killed_holder(temporary_files, "", "alone")
    assert all(start_mark(pid) for pid in children) and data.exists()
    (temporary_files / "readyplane-up-foreign").mkdir()
    with DataFolder.open() as held:
        assert await sweep_abandoned() == (data,)
        assert sorted(temporary_files.iterdir()) == sorted(
            [held.path, temporary_files / "readyplane-up-foreign"]
        )
    assert not any(start_mark(pid) for pid in children)


async def test_the_next_holder_ends_what_was_left(tmp_path: Path, temporary_files: Path) -> None:
    data, children = killed_holder(temporary_files, str(tmp_path / "data"), "alone")
    with DataFolder.open(data) as folder:
        assert all(start_mark(pid) for pid in children)
        assert await folder.recover() == ("a", "a")
        assert not any(start_mark(pid) for pid in children)
        assert await folder.recover() == ()
    assert list(temporary_files.iterdir()) == []


def test_a_guarded_supervisor_leaves_nothing_when_killed(temporary_files: Path) -> None:
    _, children = killed_holder(temporary_files, "", "guarded")
    until(lambda: not any(temporary_files.iterdir()))
    assert not any(start_mark(pid) for pid in children)


def test_the_warden_waits_for_a_dying_supervisor(temporary_files: Path) -> None:
    """It hears of the death by its pipe, which may close before the lock is free."""
    folder = DataFolder.open()
    folder.guard()
    warden = folder._warden
    assert warden is not None and warden.stdin is not None
    warden.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        warden.wait(0.5)
    assert folder._lock is not None and folder.path.exists()
    os.close(folder._lock)
    assert warden.wait(10) == 0
    assert not folder.path.exists()


def test_opening_waits_for_the_warden(tmp_path: Path, temporary_files: Path) -> None:
    data, children = killed_holder(temporary_files, str(tmp_path / "data"), "guarded")
    until(lambda: not any(start_mark(pid) for pid in children))
    with DataFolder.open(data) as folder:
        assert not [*folder.run.glob("*.json"), *folder.pg.glob("*.json")]


def test_an_orderly_close_dismisses_the_warden(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path / "data")
    folder.guard()
    folder.guard()
    warden = folder._warden
    assert warden is not None and warden.poll() is None
    assert os.getsid(warden.pid) == warden.pid
    folder.close()
    assert warden.returncode == 0
    assert (folder.logs / "warden.log").read_text() == ""


# -- outside paths --------------------------------------------------------------------------------


def test_outside_paths_go_with_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "readyplane-x"
    (outside / "deep").mkdir(parents=True)
    record_outside(tmp_path, outside)
    remove_outside(tmp_path)
    assert not outside.exists()
    remove_outside(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"paths": 1}', '{"paths": ["{}"]}'])
def test_only_what_is_ours_is_removed(tmp_path: Path, text: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "readyplane-link").symlink_to(other)
    for path in (other, tmp_path / "readyplane-link", tmp_path / "readyplane-absent"):
        record = tmp_path / "outside-paths.json"
        record.write_text(text.replace("{}", str(path)))
        remove_outside(tmp_path)
        assert other.exists() and not record.exists()
