"""`readyplane trace info` and `readyplane replay`: the figures of a trace, and equal files each time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli_world import Terminal, clean_environment

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:00:00.0000000,100,10",
    "2023-11-16 18:00:30.0000000,300,30",
    "2023-11-16 18:01:10.0000000,200,20",
    "2023-11-16 18:01:20.0000000,400,40",
    "2023-11-16 18:01:40.0000000,500,50",
)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


def test_an_azure_trace(cli: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "small.csv"
    path.write_text("\n".join(AZURE) + "\n")
    found = cli("trace", "info", str(path), "--json").document
    assert found == {
        "name": "small",
        "format": "azure",
        "requests": 5,
        "span_s": 100.0,
        "rate": {
            "mean_rps": 0.05,
            "peak_minute_rps": 3 / 60,
            "prompt_tokens_per_s": 15.0,
            "output_tokens_per_s": 1.5,
        },
        "isl": {
            "mean": 300.0,
            "min": 100.0,
            "p50": 300.0,
            "p90": pytest.approx(460.0),
            "p99": pytest.approx(496.0),
            "max": 500.0,
        },
        "osl": {
            "mean": 30.0,
            "min": 10.0,
            "p50": 30.0,
            "p90": pytest.approx(46.0),
            "p99": pytest.approx(49.6),
            "max": 50.0,
        },
        "prefix": {"ideal_hit": None},
        "note": "",
    }
    out = cli("trace", "info", str(path)).out
    assert "0.05 requests/s on average, 0.05 in the peak minute" in out
    assert "does not say which prompts begin alike" in out
    few = cli("trace", "info", str(path), "--limit", "1", "--json").document
    assert few["rate"]["mean_rps"] is None, "one request has no rate"


def test_a_mooncake_trace_shares_prefixes(cli: Terminal, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 1536, "output_length": 5, "hash_ids": [1, 2, 3]},
        # The same block behind another beginning is another block.
        {"timestamp": 6000, "input_length": 1024, "output_length": 5, "hash_ids": [9, 2]},
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = cli("trace", "info", str(path), "--json").document
    assert found["format"] == "mooncake" and "jitter" in found["note"]
    assert found["prefix"]["ideal_hit"] == pytest.approx(1024 / 3584)
    path.write_text("\n".join([*map(json.dumps, rows), '{"timestamp": 1}']))
    broken = cli("trace", "info", str(path))
    assert broken.code == 2 and "line 4" in broken.err


def _replay(out: Path, hash_seed: str) -> "subprocess.Popen[str]":
    argv = (
        *(sys.executable, "-m", "readyplane_lab.cli", "replay", "--conversation"),
        *("--rate", "5", "--duration", "8", "--seed", "5", "--out", str(out), "--json"),
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)


def test_replay_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Byte for byte, whatever the order in which this process walks through sets."""
    runs = [_replay(tmp_path / name, seed) for name, seed in (("a", "1"), ("b", "2"))]
    said = [json.loads(run.communicate(timeout=100)[0]) for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    for name in ("replay.json", "replay.png"):
        one, two = (tmp_path / folder / name for folder in "ab")
        assert one.read_bytes() == two.read_bytes(), name
    document = json.loads((tmp_path / "a" / "replay.json").read_text())
    assert document["requests"] > 20 and sum(document["outcomes"].values()) == document["requests"]
    assert len(document["series"]["t_s"]) > 1
    assert said[0]["attainment"] == document["attainment"]
    assert {k: v for k, v in said[0].items() if k != "files"} == {
        k: v for k, v in said[1].items() if k != "files"
    }
    assert "series" not in said[0] and isinstance(said[0]["workers"], int)


def test_replay_of_a_trace_with_a_policy(cli: Terminal, tmp_path: Path) -> None:
    trace, policy = tmp_path / "small.csv", tmp_path / "policy.yaml"
    trace.write_text("\n".join(AZURE) + "\n")
    policy.write_text("prefill: {min: 2}\n")
    argv = ("replay", "--trace", str(trace), "--policy", str(policy), "--out", str(tmp_path / "o"))
    said = cli(*argv, "--limit", "2")
    assert said.code == 0 and said.err == ""
    assert "2 requests: 2 finished" in said.out and "attainment 100.0%" in said.out
    assert str(tmp_path / "o" / "replay.json") in said.out.splitlines()
    report = json.loads((tmp_path / "o" / "replay.json").read_text())
    assert report["policy"]["prefill"]["min"] == 2 and report["policy"]["prefill"]["max"] == 6
    policy.write_text("prefil: {min: 2}\n")
    refused = cli(*argv)
    assert refused.code == 2 and "did you mean policy.prefill?" in refused.err


def test_replay_of_a_trace_under_two_rules(cli: Terminal, tmp_path: Path) -> None:
    trace = tmp_path / "small.csv"
    trace.write_text("\n".join(AZURE) + "\n")
    argv = ("replay", "--trace", str(trace), "--compare", "readyplane,hpa:0.5", "--t-ready", "10")
    said = cli(*argv, "--out", str(tmp_path / "o"))
    assert said.code == 0, said.err
    assert "hpa at 0.5" in said.out and "attained" in said.out
    document = json.loads((tmp_path / "o" / "replay.json").read_text())
    assert sorted(document["runs"]) == ["hpa at 0.5", "readyplane"]
    for run in document["runs"].values():
        assert run["scores"]["arrivals"] == document["requests"] == 5
        assert run["scores"]["attainment"] == 1.0 and run["scores"]["gpu_hours"] > 0
    assert (tmp_path / "o" / "replay.png").stat().st_size > 10_000
