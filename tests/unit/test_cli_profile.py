"""`readyplane profile`: what it prints, what it writes, and what it will not write."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from readyplane import profiles
from readyplane_planner.policy import read_policy
from tests.unit.cli_world import Terminal, clean_environment


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


def surfaces(folder: Path, *, lengths: int) -> Path:
    """Two files as Dynamo's profiler writes them, of an engine with known times."""
    folder.mkdir(exist_ok=True)
    isl = np.geomspace(100, 8000, lengths)
    np.savez(folder / "p.npz", prefill_isl=isl, prefill_ttft=10.0 + 0.02 * isl)
    usage, context = np.meshgrid([0.01, 0.2, 0.6], [400.0, 4000.0])
    held = usage.ravel() * 100_000
    np.savez(
        folder / "d.npz",
        x_kv_usage=usage.ravel(),
        y_context_length=context.ravel(),
        z_itl=6.0 + 0.05 * held / context.ravel() + 2e-5 * held,
        max_kv_tokens=np.array([100_000]),
    )
    return folder


def test_what_ships_is_listed(cli: Terminal) -> None:
    found = {p["name"]: p for p in cli("profile", "list", "--json").document["profiles"]}
    assert set(found) == set(profiles.names())
    assert found["unknown"]["measured"] is False and found["h200-llama8b-fp8"]["measured"]
    assert "conservative assumptions" in cli("profile", "list").out


def test_a_profile_is_shown_with_its_capacities_and_curves(cli: Terminal) -> None:
    said = cli("profile", "show", "h100-tp4-llama70b", "--plot")
    assert said.code == 0
    for text in (
        "474,000 tokens",
        "held out",
        "straight line",
        "prefill_ms",
        "iteration_ms",
        "(log)",
    ):
        assert text in said.out
    told = cli("profile", "show", "h100-tp4-llama70b", "--json", "--itl-ms", "40").document
    real = profiles.load("h100-tp4-llama70b")
    assert told["decode"][0]["sequences"] == pytest.approx(
        real.decode_sequences(tpot_s=0.04, context=1000)
    )
    assert told["prefill"][1]["tokens_per_s"] == pytest.approx(real.prefill_tokens_per_s(2048))
    assert [f["stage"] for f in told["fit"]] == ["prefill", "decode"]
    assert cli("profile", "show", "nope").code == 1
    assert cli("profile", "show", "unknown", "--itl-ms", "0").code == 2


def test_an_imported_profile_is_one_that_a_policy_takes(cli: Terminal, tmp_path: Path) -> None:
    out = tmp_path / "b300.json"
    folder = surfaces(tmp_path / "dynamo", lengths=8)
    options = ("--worker-class", "b300", "--base", "h200-llama8b-fp8", "--out", str(out))
    said = cli("profile", "import", str(folder), *options)
    assert said.code == 0 and str(out) in said.err
    made = profiles.load(str(out))
    a, b, c = (1e3 * v for v in made.decode_coefficients_s())
    assert a == pytest.approx(6.0, rel=0.01)
    assert b == pytest.approx(0.05, rel=0.01)
    assert c == pytest.approx(2e-5, rel=0.01)
    assert (made.kv_capacity_tokens, made.kv_bytes_per_token) == (100_000, 65_536)
    assert made.source.startswith("imported from Dynamo: dynamo")
    assert made.fit and made.measured
    pool = {"worker_class": "b300", "profile": str(out)}
    read_policy({"model": "demo", "prefill": pool, "decode": pool})


def test_a_profile_of_too_little_is_not_written(cli: Terminal, tmp_path: Path) -> None:
    out = tmp_path / "few.json"
    options = ("--worker-class", "x", "--kv-bytes-per-token", "65536", "--out", str(out))
    folder = str(surfaces(tmp_path / "few", lengths=3))
    said = cli("profile", "import", folder, *options)
    assert said.code == 1 and "3 prompt lengths" in said.err and "nothing was written" in said.err
    assert not out.exists()
    said = cli("profile", "import", folder, *options, "--force")
    assert said.code == 0 and "written all the same" in said.err
    assert "forced: 3 prompt lengths" in profiles.load(str(out)).source


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("measure", "http://127.0.0.1:1", "--out", "x.json"), "2 x layers x KV heads"),
        (("measure", "127.0.0.1:1", "--out", "x.json"), "write http://HOST:PORT"),
        (("measure", "http://127.0.0.1:1", "--out", "x.json", "--repeats", "0"), "at least 1"),
        (("measure", "http://127.0.0.1:1", "--out", "x.json", "--max-seconds", "nan"), "at least"),
        (("measure", "http://127.0.0.1:1", "--out", "x.json", "--max-seconds", "inf"), "at least"),
        (("import", "a.npz", "--out", "x.yaml"), "end it in .json"),
        (("import", "a.npz", "--out", "/nowhere/x.json"), "a folder that exists"),
        (("import", "a.npz", "--out", "x.json", "--gpus", "-1"), "above 0"),
        (("assume", "--out", "x.json", "--model-bytes", "-5"), "above 0"),
    ],
)
def test_bad_flags_are_named_before_anything_is_done(
    cli: Terminal, argv: tuple[str, ...], said: str
) -> None:
    found = cli("profile", *argv, "--worker-class", "x")
    assert found.code == 2 and said in found.err


def test_nobody_there_is_unreachable(cli: Terminal, tmp_path: Path) -> None:
    out = ("--worker-class", "x", "--base", "h200-llama8b-fp8", "--out", str(tmp_path / "x.json"))
    assert cli("profile", "measure", "http://127.0.0.1:1", *out).code == 3


def test_assumptions_are_written_and_marked(cli: Terminal, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    flags = ("--gpus", "8", "--model-bytes", "140e9", "--kv-tokens", "900000")
    said = cli("profile", "assume", "--worker-class", "b300", *flags, "--out", str(out))
    assert said.code == 0 and "advice first" in said.out and "% off" not in said.out
    document = json.loads(out.read_text())
    assert document["measured"] is False and document["kv_capacity_tokens"] == 900_000
    pool = {"worker_class": "b300", "profile": str(out)}
    read_policy({"model": "demo", "prefill": pool, "decode": {**pool, "profile": "unknown"}})
