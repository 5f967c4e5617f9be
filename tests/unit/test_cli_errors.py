"""Errors of the command: one line on stderr, nothing on stdout, a code that means something."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import (
    Conflict,
    InvalidField,
    LostLease,
    NoPair,
    NotFound,
    ReadyplaneError,
    Refused,
    Unauthenticated,
    Unavailable,
    UnknownField,
    Unsupported,
)
from readyplane_lab.cli.faults import exit_code
from readyplane_lab.up.options import UpOptions
from readyplane_lab.up.pids import start_mark
from tests.unit.cli_world import (
    CLUSTER,
    FakePlanner,
    FakeRouter,
    Terminal,
    clean_environment,
    stand_in,
)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


@pytest.mark.parametrize(
    ("argv", "code", "fragment"),
    [
        # what cannot be understood
        (("wrokers",), 2, "No such command 'wrokers'. Did you mean 'workers'"),
        (("workers", "--jsn"), 2, "see `readyplane workers --help`"),
        (("decisions", "--limit", "many"), 2, "command line: Invalid value for '--limit'"),
        (("drain",), 2, "WORKER"),
        (("attach", "http://127.0.0.1:1"), 2, "--role"),
        # what is wrong
        (("decisions", "--limit", "0"), 2, "--limit: 0 is not valid; give 1 to"),
        (("workers", "--router", "http://x:1"), 2, "--router: 'http://x:1' is not valid"),
        (("workers", "--router", "x"), 2, "write HOST:PORT"),
        (("workers", "--router", "x:99999"), 2, "write HOST:PORT"),
        (("artifact", "list", "--registry", ":1"), 2, "write HOST:PORT"),
        (("drain", "w", "--deadline", "nan"), 2, "--deadline"),
        (("drain", "w", "--deadline", "-1"), 2, "--deadline"),
        (("route",), 2, "give one of --tokens"),
        (("route", "--tokens", "1", "--prompt", "x"), 2, "'--tokens --prompt' is not valid"),
        (("route", "--tokens", "0"), 2, "--tokens: 0"),
        (("route", "--tokens", "99999999999"), 2, "--tokens"),
        (("route", "--tokens", "5", "--max-tokens", "-1"), 2, "--max-tokens: -1"),
        (("route", "--prompt", ""), 2, "at least one character"),
        (("route", "--prompt-file", "/nonexistent"), 2, "No such file"),
        (("trace", "info", "/nonexistent"), 2, "/nonexistent"),
        (("trace", "info", "/"), 2, "directory"),
        (("replay", "--out", "x"), 2, "give one of --trace FILE, --conversation, --scenario"),
        (("replay", "--scenario", "calm", "--conversation", "--out", "x"), 2, "give one of"),
        (("replay", "--scenario", "nowhere", "--out", "x"), 2, "use one of az-code"),
        (("replay", "--scenario", "calm", "--policy", "nobody", "--out", "x"), 2, "use one of"),
        (("replay", "--scenario", "calm", "--policy", "hpa:x", "--out", "x"), 2, "write hpa:0.7"),
        (("replay", "--scenario", "calm", "--compare", ",", "--out", "x"), 2, "with commas"),
        (("replay", "--scenario", "calm", "--peak", "nan", "--out", "x"), 2, "--peak"),
        (("replay", "--scenario", "calm", "--t-ready", "0", "--out", "x"), 2, "--t-ready"),
        (("prove", "--quick", "--full", "--out", "x"), 2, "give one of them"),
        (("prove", "--scenario", "nowhere", "--out", "x"), 2, "use one of az-code"),
        (("prove", "--policy", "nobody", "--out", "x"), 2, "use one of"),
        (("prove", "--attainment", "2", "--out", "x"), 2, "--attainment"),
        (("prove", "--processes", "-1", "--out", "x"), 2, "--processes"),
        (("prove", "--t-ready", "nan", "--out", "x"), 2, "--t-ready"),
        (("prove", "--peak", "1", "--out", "x"), 2, "--peak"),
        (("prove", "--seed", "-1", "--out", "x"), 2, "--seed"),
        (("replay", "--conversation", "--rate", "0", "--out", "x"), 2, "--rate: 0.0"),
        (("replay", "--conversation", "--rate", "inf", "--out", "x"), 2, "--rate"),
        (("replay", "--conversation", "--duration", "nan", "--out", "x"), 2, "--duration"),
        (("replay", "--conversation", "--duration", "inf", "--out", "x"), 2, "--duration"),
        (("replay", "--conversation", "--rate", "nan", "--out", "x"), 2, "--rate: nan"),
        (("replay", "--conversation", "--rate", "inf", "--out", "x"), 2, "--rate: inf"),
        (("replay", "--conversation", "--peak", "nan", "--out", "x"), 2, "--peak: nan"),
        (("replay", "--conversation", "--t-ready", "nan", "--out", "x"), 2, "--t-ready: nan"),
        (("replay", "--conversation", "--out", "/proc/x"), 2, "--out"),
        (("prove", "--attainment", "nan", "--out", "x"), 2, "--attainment: nan"),
        (("prove", "--t-ready", "inf", "--out", "x"), 2, "--t-ready: inf"),
        (("prove", "--peak", "nan", "--out", "x"), 2, "--peak: nan"),
        (("prove", "--peak", "-1", "--out", "x"), 2, "--peak: -1"),
        (("replay", "--trace", "x", "--rate", "1", "--out", "x"), 2, "its own arrivals"),
        (("up", "--speed", "0"), 2, "--speed"),
        (("up", "--model-mb", "nan"), 2, "--model-mb: nan is not valid; give 13 to 4000"),
        (("up", "--model-mb", "inf"), 2, "give 13 to 4000"),
        (("up", "--model-mb", "1e305"), 2, "give 13 to 4000"),
        (("up", "--model-mb", "-1"), 2, "give 13 to 4000"),
        (("up", "--duration", "inf"), 2, "--duration: inf"),
        (("up", "--duration", "nan"), 2, "--duration: nan"),
        (("up", "--rate", "inf"), 2, "--rate: inf"),
        (("up", "--speed", "nan"), 2, "--speed: nan"),
        (("up", "--seed", "-1"), 2, "--seed: -1"),
        (("up", "--workers-max", "1"), 2, "--workers-max"),
        (("up", "--page-port", "70000"), 2, "--page-port"),
        (("up", "--log-level", "loud"), 2, "--log-level"),
        (("up", "--trace", "x", "--no-load"), 2, "--trace"),
        (("up", "--trace", "x", "--rate", "3"), 2, "--rate"),
        (("up", "--policy", "/nonexistent.yaml"), 2, "--policy"),
        (("attach", "127.0.0.1:8000", "--role", "decode"), 2, "write http://HOST:PORT"),
        (("attach", "http://127.0.0.1:1", "--role", "decoder"), 2, "--role: 'decoder'"),
        (
            ("attach", "http://127.0.0.1:1", "--role", "decode", "--drain-deadline", "nan"),
            2,
            "--drain-deadline: nan",
        ),
        (("artifact", "publish"), 2, "give a folder, or --demo"),
        (("artifact", "publish", "x", "--demo"), 2, "give a folder, or --demo"),
        (("artifact", "publish", "x"), 2, "--model"),
        (("artifact", "publish", "x", "--model", "m", "--tp", "0"), 2, "--tp"),
        (("artifact", "publish", "--demo", "--model-mb", "8"), 2, "give 13 to 4000"),
        (("artifact", "publish", "--demo", "--model-mb", "nan"), 2, "give 13 to 4000"),
        (("artifact", "publish", "--demo", "--model-mb", "inf"), 2, "give 13 to 4000"),
        (("artifact", "publish", "--demo", "--model-mb", "-1"), 2, "give 13 to 4000"),
        (("artifact", "tag", "t", "--force"), 2, "REF"),
        (("artifact", "list", "--registry-http", "x"), 2, "No such option"),
        (("artifact", "verify", "x", "--registry-http", "ftp://x"), 2, "http://HOST:PORT"),
        (("artifact", "verify", "x", "--registry", "h:1"), 2, "--registry-http"),
        (("policy", "set", "paused"), 2, "write it like"),
        (("doctor", "--port", "0"), 2, "--port: 0"),
        # where nothing runs
        (("workers",), 3, "start one with `make up`"),
        (("drain", "w"), 3, "READYPLANE_ROUTER"),
        (("decisions",), 3, "READYPLANE_PLANNER"),
        (("explain", "last"), 3, "READYPLANE_PLANNER"),
        (("route", "--tokens", "5"), 3, "READYPLANE_ROUTER"),
        (("policy", "show"), 3, "READYPLANE_PLANNER"),
        (("artifact", "list"), 3, "READYPLANE_REGISTRY"),
        (("artifact", "publish", "--demo"), 3, "READYPLANE_REGISTRY_HTTP"),
        (("workers", "--router", "127.0.0.1:1"), 3, "the router at 127.0.0.1:1 cannot be reached"),
    ],
)
def test_one_line_and_a_code(
    cli: Terminal, argv: tuple[str, ...], code: int, fragment: str
) -> None:
    said = cli(*argv)
    assert said.code == code, said.err
    assert said.out == ""
    assert said.err.startswith("error ") and said.err.count("\n") == 1
    assert fragment in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidField("f", 1, "r"), 2),
        (UnknownField("f", 1, "r"), 2),
        (NotFound("worker", "w"), 1),
        (Conflict("tag", "a", "b", "r"), 1),
        (LostLease("w", "i", "why"), 1),
        (Refused("it", ["why"]), 1),
        (NoPair("why", 1.0), 1),
        (Unavailable("it", "r"), 3),
        (Unsupported("it", "r"), 1),
        (Unauthenticated(), 1),
        (ReadyplaneError("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_each_error_has_its_code(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_up_refuses_a_wrong_policy_before_it_starts_anything(
    cli: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("readyplane_lab.up.run.main", lambda _: pytest.fail("started"))
    (tmp_path / "p.yaml").write_text("prefil: {max: 3}")
    said = cli("up", "--policy", str(tmp_path / "p.yaml"))
    assert said.code == 2 and "did you mean policy.prefill?" in said.err


def test_up_hands_every_flag_on(
    cli: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def main(options: UpOptions) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr("readyplane_lab.up.run.main", main)
    (tmp_path / "p.yaml").write_text("prefill: {max: 3}")
    given = {
        "trace": tmp_path / "t.csv",
        "speed": 2.0,
        "duration_s": 9.0,
        "seed": 4,
        "data_dir": tmp_path / "d",
        "database_url": "postgresql://x",
        "redis_url": "redis://x",
        "page_port": 8080,
        "gateway_port": 8081,
        "workers_max": 5,
        "report_file": tmp_path / "r",
        "policy_file": tmp_path / "p.yaml",
        "otlp_endpoint": "http://o:4317",
        "log_level": "debug",
    }
    argv = [
        part
        for name, value in given.items()
        for part in (
            "--" + name.removesuffix("_s").removesuffix("_file").replace("_", "-"),
            str(value),
        )
    ]
    assert cli("up", *argv, "--quick", "--plain", "--model-mb", "50").code == 1
    (options,) = seen
    assert {name: getattr(options, name) for name in given} == given
    assert (options.quick, options.plain, options.load) == (True, True, True)
    assert options.model_bytes == 50_000_000
    assert cli("up", "--no-load", "--rate", "7").code == 1
    assert seen[1] == replace(UpOptions(), load=False, rate_rps=7.0)


@pytest.mark.parametrize("argv", [(), ("artifact",), ("policy",), ("trace",), ("--help",), ("-h",)])
def test_a_group_alone_shows_its_help(cli: Terminal, argv: tuple[str, ...]) -> None:
    said = cli(*argv)
    assert said.code == 0 and said.err == ""
    assert "Usage: readyplane" in said.out and "Commands" in said.out


def test_version(cli: Terminal) -> None:
    from importlib.metadata import version

    assert cli("--version").out == f"readyplane {version('readyplane')}\n"


def test_no_colour_where_it_is_not_wanted(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in cli("--help").out
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert "\x1b" not in cli("workers").err


# --------------------------------------------------------------------------- where the system is


def _write_book(state: Path, **changes: Any) -> None:
    import os

    names = ("registry", "router", "planner", "actuator")
    book = {name: f"127.0.0.1:{7000 + i}" for i, name in enumerate(names)}
    book |= {
        f"{n}_http": "http://127.0.0.1:80" for n in ("registry", "router", "planner", "gateway")
    }
    book |= {"token": "book-token", "model": "demo", "data_dir": "/d", "logs_dir": "/l"}
    folder = state / "readyplane"
    folder.mkdir(parents=True)
    document = {"pid": os.getpid(), "mark": start_mark(os.getpid()), **book, **changes}
    (folder / "up.json").write_text(json.dumps(document))


def test_the_address_book_is_used_with_its_token(
    cli: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    stand_in(monkeypatch, "RouterClient", FakeRouter(), seen)
    stand_in(monkeypatch, "PlannerClient", FakePlanner(), seen)
    monkeypatch.setenv("READYPLANE_TOKEN", "of-another-system")
    _write_book(tmp_path / "state")
    assert cli("workers").code == 0
    assert seen == [("127.0.0.1:7001", "book-token"), ("127.0.0.1:7002", "book-token")]


def test_the_books_token_never_goes_to_an_address_that_was_given(
    cli: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    stand_in(monkeypatch, "RouterClient", FakeRouter(), seen)
    _write_book(tmp_path / "state")
    assert cli("workers", *CLUSTER).code == 0
    assert seen == [("10.0.0.1:7001", "")]
    monkeypatch.setenv("READYPLANE_TOKEN", "mine")
    monkeypatch.setenv("READYPLANE_ROUTER", "10.0.0.2:7001")
    assert cli("workers").code == 0
    assert seen[-1] == ("10.0.0.2:7001", "mine")


def test_a_book_of_a_killed_run_is_not_believed(cli: Terminal, tmp_path: Path) -> None:
    _write_book(tmp_path / "state", mark="another life")
    assert cli("workers").code == 3


# --------------------------------------------------------------------------- faults and interrupts


def test_a_fault_of_ours_has_no_traceback_unless_asked_for(
    cli: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = FakeRouter()
    monkeypatch.setattr(broken, "list_workers", None)
    stand_in(monkeypatch, "RouterClient", broken)
    said = cli("workers", *CLUSTER)
    assert said.code == 1 and said.err.count("\n") == 1 and "--debug" in said.err
    assert "Traceback" in cli("--debug", "workers", *CLUSTER).err
    assert "Traceback" in cli("workers", *CLUSTER, "--debug").err, (
        "where who repeats a line puts it"
    )
    monkeypatch.setenv("READYPLANE_DEBUG", "1")
    assert "Traceback" in cli("workers", *CLUSTER).err


def test_ctrl_c(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    router = FakeRouter()
    monkeypatch.setattr(router, "list_workers", interrupted)
    stand_in(monkeypatch, "RouterClient", router)
    said = cli("workers", *CLUSTER)
    assert (said.code, said.out, said.err.strip()) == (130, "", "")


def test_an_error_of_many_lines_is_one_line(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    error = Unavailable("service planner ended:\nline 1\n  line 2", "see its log")
    stand_in(monkeypatch, "RouterClient", FakeRouter(error=error))
    assert cli("workers", *CLUSTER).err == (
        "error service planner ended: line 1 line 2; see its log\n"
    )


# --------------------------------------------------------------------------- quick start


def test_help_imports_nothing_heavy() -> None:
    """`readyplane --help` must stay quick: what a command needs it imports when it runs."""
    code = (
        "import sys; from readyplane_lab.cli.__main__ import main; main(['up', '--help']);"
        "heavy = {'numpy', 'grpc', 'asyncio', 'aiohttp', 'sqlalchemy', 'fastapi',"
        "'matplotlib', 'yaml', 'psutil', 'redis', 'xxhash', 'opentelemetry'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stderr.strip() == "[]"


def test_the_installed_command_ends_with_the_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "readyplane_lab.cli", "route"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
