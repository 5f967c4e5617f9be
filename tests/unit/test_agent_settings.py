"""Flags, environment and defaults of an agent: one clear error each."""

from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.startup import StartMode
from readyplane.core.worker import Role
from readyplane_agent.folder import MARK, remove_left_behind, work_folder
from readyplane_agent.settings import AgentSettings, parse

FULL = [
    *("--worker-id", "w1", "--role", "prefill", "--model", "m", "--worker-class", "c"),
    *("--manifest", "sha256:x", "--generation", "2", "--mode", "eager", "--node", "n"),
    *("--registry", "r:1", "--router", "r:2", "--work-dir", "/tmp/w", "--engine", "modelled"),
    *("--profile", "h200-slow10"),
]


def parsed(*more: str, **env: str) -> AgentSettings:
    return parse([*FULL, *more], env)


def test_flags_of_an_actuator() -> None:
    s = parsed("--scale-decision-id", "", READYPLANE_ORDERED_AT_MONOTONIC_S="12.5")
    assert (s.role, s.mode, s.generation) == (Role.PREFILL, StartMode.EAGER, 2)
    assert s.work_dir == Path("/tmp/w")
    assert s.ordered_at_s == 12.5
    assert s.scale_decision_id == ""
    assert s.engine_args == ()


def test_a_flag_is_above_the_environment_is_above_the_default() -> None:
    assert parsed().read_connections == 4
    assert parsed(READYPLANE_READ_CONNECTIONS="7").read_connections == 7
    assert parsed("--read-connections", "2", READYPLANE_READ_CONNECTIONS="7").read_connections == 2
    assert parsed("--engine-arg=--x=1", "--engine-arg=-y").engine_args == ("--x=1", "-y")


@pytest.mark.parametrize(
    "more, field",
    [
        (("--role", "both-of-them"), "--role"),
        (("--mode", "fast"), "--mode"),
        (("--generation", "two"), "--generation"),
        (("--generation", "0"), "--generation"),
        (("--staging-bytes", "-1"), "--staging-bytes"),
        (("--staging-bytes", "1000"), "--staging-bytes"),
        (("--staging-node-bytes", "30000"), "--staging-node-bytes"),
        (("--stall-s", "nan"), "--stall-s"),
        (("--drain-deadline-s", "0"), "--drain-deadline-s"),
        (("--engine", "magic"), "--engine"),
        (("--engine", "attached"), "--engine-url"),
        (("--engine-url", "http://x:1"), "--engine-url"),
        (("--registry", ""), "--registry"),
        (("--worker-id", ""), "--worker-id"),
        (("--transfer-bytes-per-s", "inf"), "--transfer-bytes-per-s"),
    ],
)
def test_a_wrong_value_names_flag_and_remedy(more: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        parsed(*more)


def test_a_missing_flag_names_its_variable() -> None:
    with pytest.raises(InvalidField, match="READYPLANE_MODEL"):
        parse(["--worker-id", "w", "--role", "decode"], {})


def test_an_unknown_flag_is_never_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parsed("--worker-clas", "x")
    assert left.value.code == 2
    assert "--worker-clas" in capsys.readouterr().err


def test_the_work_folder_is_emptied_only_if_an_agent_left_it(tmp_path: Path) -> None:
    ours = tmp_path / "new" / "w1"
    work_folder(ours)
    (ours / "old").mkdir()
    (ours / "old" / "engine.log").write_text("x")
    work_folder(ours)
    assert [p.name for p in ours.iterdir()] == [MARK]
    theirs = tmp_path / "home"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("x")
    with pytest.raises(InvalidField, match=r"thesis\.txt in it is not an agent's"):
        work_folder(theirs)
    assert (theirs / "thesis.txt").exists()


def test_only_a_marked_folder_in_its_own_place_is_removed(tmp_path: Path) -> None:
    workers = tmp_path / "workers"
    ours = workers / "w1"
    work_folder(ours)
    (ours / "files").mkdir()
    (ours / "files" / "a").write_text("x")
    (ours / "engine.log").write_text("x")
    (tmp_path / "kept").write_text("x")
    (ours / "link").symlink_to(tmp_path)
    theirs = workers / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("x")
    (workers / "elsewhere").symlink_to(ours)
    (tmp_path / MARK).touch()  # even a marked one is left alone where it does not belong
    for path in (theirs, workers / "gone", workers / "elsewhere", workers / "..", tmp_path):
        assert not remove_left_behind(path, within=workers)
    assert (ours / "engine.log").exists()
    assert remove_left_behind(ours, within=workers)
    assert not ours.exists()
    assert (tmp_path / "kept").exists()
    assert not remove_left_behind(ours, within=workers)
