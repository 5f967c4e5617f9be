"""Other tools' files: what they say comes back in our units, and what they do not say is asked for."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane_lab.profiling.columns import milliseconds, number, split_unit
from readyplane_lab.profiling.fitting import Naming, profile_of
from readyplane_lab.profiling.importing import read_files
from readyplane_lab.profiling.runs import Run, readings_of

DATA = Path(__file__).parents[2].parent / "shared/data/profiles/dynamo_H200_TP1P_TP1D"
SHARED = pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not there")


# --------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("name", "short", "unit"),
    [
        ("Time to First Token (ms)", "time to first token", "ms"),
        ("Request Latency [s]", "request latency", "s"),
        ("time_to_first_token_ms", "time to first token", "ms"),
        ("Inter Token Latency", "inter token latency", ""),
        ("Output Sequence Length (tokens)", "output sequence length", "tokens"),
        ("HTTP Duration (excl. conn) (ms)", "http duration excl conn", "ms"),
    ],
)
def test_units_are_in_names(name: str, short: str, unit: str) -> None:
    assert split_unit(name) == (short, unit)


def test_a_unit_is_never_guessed() -> None:
    assert milliseconds(0.2, "Seconds", column="x") == pytest.approx(200.0)
    assert milliseconds(5.0, "µs", column="x") == pytest.approx(0.005)
    for unit in ("", "tokens", "furlongs"):
        with pytest.raises(InvalidField, match="name the column with its unit"):
            milliseconds(1.0, unit, column="TTFT")
    assert number("1,234.5") == 1234.5
    assert number("") is None and number(True) is None and number(None) is None


# --------------------------------------------------------------------------- Dynamo


@SHARED
def test_dynamos_measured_surfaces_are_the_shipped_profile() -> None:
    found = read_files([DATA])
    assert (found.kv_tokens, found.gpus, found.tools) == (945_029, 1, ["Dynamo"])
    shipped = profiles.load("h200-llama8b-fp8")
    naming = Naming("h", "s", "h200", 1, 1.0, 945_029, 65_536, 8192, 512)
    made = profile_of(found.readings, naming)
    assert [p[0] for p in made.prefill_points] == [p[0] for p in shipped.prefill_points]
    assert made.decode_coefficients_s() == pytest.approx(shipped.decode_coefficients_s(), rel=1e-3)
    for tokens in (500, 5000, 20_000):
        assert made.prefill_s(tokens) == pytest.approx(shipped.prefill_s(tokens), rel=1e-5)


def resampled(path: Path) -> None:
    held, context = np.linspace(0.0, 100_000.0, 21), np.geomspace(64, 8192, 12)
    surface = 5.0 + 2e-5 * held[:, None] + 0.03 * held[:, None] / context[None, :]
    np.savez(
        path,
        prefill_isl=np.array([128.0, 1024.0, 8192.0]),
        prefill_ttft_ms=np.array([15.0, 40.0, 250.0]),
        decode_active_kv_tokens=held,
        decode_context_length=context,
        decode_itl=surface,
    )


def test_the_simulators_surface_comes_back(tmp_path: Path) -> None:
    resampled(tmp_path / "fit.npz")
    found = read_files([tmp_path / "fit.npz"])
    made = profile_of(found.readings, Naming("x", "s", "x", 1, 1.0, 100_000, 1, 8192, 256))
    for found_ms, known in zip(made.decode_coefficients_s(), (5.0, 0.03, 2e-5), strict=True):
        assert found_ms * 1e3 == pytest.approx(known, rel=0.02)
    assert made.prefill_s(8192) == pytest.approx(0.25)
    assert found.kv_tokens == 100_000 and found.readings.notes


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x_kv_usage": [0.1], "y_context_length": [350.0], "z_itl": [4.0]}, "max_kv_tokens"),
        ({"prefill_isl": [1.0, 2.0], "prefill_ttft": [1.0]}, "one length"),
        ({"prefill_isl": [100.0], "prefill_ttft": [float("nan")]}, "not finite"),
        ({"something": [1.0]}, "Dynamo's profiler"),
    ],
)
def test_bad_arrays_are_named(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    np.savez(tmp_path / "bad.npz", **{k: np.array(v) for k, v in arrays.items()})  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match=said):
        read_files([tmp_path / "bad.npz"])


def test_an_archive_cannot_bring_code(tmp_path: Path) -> None:
    objects = np.array([{"a": 1}], dtype=object)
    np.savez(tmp_path / "evil.npz", prefill_isl=objects)
    with pytest.raises(InvalidField, match="use numbers, not object"):
        read_files([tmp_path / "evil.npz"])
    (tmp_path / "no.npz").write_text("no archive")
    with pytest.raises(InvalidField, match=r"readable \.npz"):
        read_files([tmp_path / "no.npz"])


# --------------------------------------------------------------------------- runs


def test_a_run_alone_tells_of_prefill_and_any_run_of_decode() -> None:
    single = Run(isl=1000, osl=101, ttft_ms=40.0, itl_ms=5.0, concurrency=1.0, requests_per_s=1.85)
    busy = Run(isl=1000, osl=101, ttft_ms=80.0, itl_ms=12.0, concurrency=16.0, requests_per_s=10.0)
    found = readings_of([single, busy])
    assert [(r.tokens, r.milliseconds) for r in found.prefill] == [(1000, 40.0)]
    alone, many = found.decode
    assert (alone.sequences, alone.milliseconds) == (1.0, 5.0)
    assert many.sequences == pytest.approx(12.0), "10 requests/s decode for 1.2 s each"
    assert many.kv_tokens == pytest.approx(12.0 * 1050.5)
    assert many.milliseconds == pytest.approx(12.0 - 40.0 * 15 / 101), "less others' prompts"
    (kept,) = readings_of([busy]).decode
    assert kept.milliseconds == 12.0
    assert "a worker that only decodes" in readings_of([busy]).notes[0]


@pytest.mark.parametrize(("isl", "ms"), [(500, 10.0), (1000, 20.0), (2000, 50.0), (3000, 80.0)])
def test_what_a_prompt_takes_between_and_beyond_the_lengths_that_were_alone(
    isl: int, ms: float
) -> None:
    alone = [Run(n, 11, t, None, 1.0) for n, t in ((500.0, 10.0), (1000.0, 20.0), (2000.0, 50.0))]
    busy = Run(isl, 101, 0.0, 100.0, 11.0)
    (found,) = readings_of([*alone, busy]).decode
    assert found.milliseconds == pytest.approx(100.0 - ms * 10 / 101)


# --------------------------------------------------------------------------- AIPerf

AIPERF = """Metric,avg,min,max,sum,p50,p99,std
Input Sequence Length (tokens),"1,024.00",1024,1024,1024,1024,1024,0
Inter Token Latency (ms),11.85,7.49,13.31,1137.34,12.25,13.27,1.25
Output Sequence Length (tokens),128.00,128,128,128,128,128,0
Request Latency (ms),1734.95,1700,1800,1,1734,1790,9
Time to First Token (ms),230.00,75.04,693.93,22093.17,177.79,687.62,152.24

Metric,Value
Benchmark Duration (sec),44.52
Request Throughput (requests/sec),2.16

Endpoint,GPU_Index,GPU_Name,Metric,avg
x,0,y,Time to First Token (ms),1.0
"""


def test_aiperf_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(AIPERF)
    found = read_files([tmp_path / "a.csv"])
    (decode,) = found.readings.decode
    assert found.tools == ["AIPerf"] and not found.readings.prefill
    assert decode.milliseconds == 11.85
    assert decode.sequences == pytest.approx(2.16 * 0.01185 * 127, abs=0.06)


def test_aiperf_in_seconds_is_the_same_run(tmp_path: Path) -> None:
    lines = AIPERF.splitlines()
    lines[2] = "Inter Token Latency (s),0.01185,0,0,0,0,0,0"
    lines[4] = "Request Latency (sec),1.73495,0,0,0,0,0,0"
    lines[5] = "Time to First Token (seconds),0.23,0,0,0,0,0,0"
    (tmp_path / "a.csv").write_text(AIPERF)
    (tmp_path / "s.csv").write_text("\n".join(lines))
    one, other = (read_files([tmp_path / n]).readings for n in ("a.csv", "s.csv"))
    assert one.decode[0].milliseconds == pytest.approx(other.decode[0].milliseconds)
    assert one.decode[0].sequences == other.decode[0].sequences


def test_aiperf_without_a_unit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text(
        AIPERF.replace("Time to First Token (ms)", "Time to First Token")
    )
    with pytest.raises(InvalidField, match="with its unit"):
        read_files([tmp_path / "u.csv"])
    (tmp_path / "m.csv").write_text("\n".join(AIPERF.splitlines()[:5]))
    with pytest.raises(InvalidField, match="concurrency"):
        read_files([tmp_path / "m.csv"])


def aiperf_json(isl: int, ttft_ms: float, itl_ms: float, clients: int) -> dict[str, Any]:
    latency_s = (ttft_ms + itl_ms * 127) / 1e3
    return {
        "schema_version": "1.3",
        "request_throughput": {"unit": "requests/sec", "avg": clients / latency_s},
        "request_latency": {"unit": "ms", "avg": latency_s * 1e3, "p50": 1.0},
        "time_to_first_token": {"unit": "ms", "avg": ttft_ms},
        "inter_token_latency": {"unit": "ms", "avg": itl_ms},
        "input_sequence_length": {"unit": "tokens", "avg": float(isl)},
        "output_sequence_length": {"unit": "tokens", "avg": 128.0},
        "input_config": {
            "phases": [
                {"name": "warmup", "concurrency": 99, "exclude_from_results": True},
                {"name": "profiling", "concurrency": clients},
            ]
        },
    }


def test_aiperf_json_runs_make_a_profile(tmp_path: Path) -> None:
    """Runs of an engine with known times: its base and its prefill come back."""
    files = []
    for isl in (128, 512, 1024, 4096):
        for clients in (1, 8, 32):
            itl_ms = 6.0 + 0.1 * clients + 1e-5 * clients * (isl + 64)
            itl_ms += (10.0 + 0.05 * isl) * (clients - 1) / 128  # others' prompts in between
            path = tmp_path / f"{isl}-{clients}.json"
            path.write_text(json.dumps(aiperf_json(isl, 10.0 + 0.05 * isl, itl_ms, clients)))
            files.append(path)
    made = profile_of(
        read_files(files).readings, Naming("x", "s", "x", 1, 1.0, 400_000, 1, 8192, 256)
    )
    assert len(made.prefill_points) == 4
    assert made.prefill_s(2048) * 1e3 == pytest.approx(112.4, rel=0.01)
    assert made.decode_coefficients_s()[0] * 1e3 == pytest.approx(6.0, rel=0.05)
    assert made.iteration_s(16, 16 * 1000) * 1e3 == pytest.approx(7.76, rel=0.05)


# --------------------------------------------------------------------------- GuideLLM


def guide_json() -> dict[str, Any]:
    def metric(mean: float) -> dict[str, Any]:
        return {"successful": {"mean": mean, "median": mean}, "errored": {"mean": 9e9}}

    def benchmark(ttft: float, itl: float, clients: float, rate: float) -> dict[str, Any]:
        return {
            "metrics": {
                "time_to_first_token_ms": metric(ttft),
                "inter_token_latency_ms": metric(itl),
                "prompt_token_count": metric(512.0),
                "output_token_count": metric(101.0),
                "request_concurrency": metric(clients),
                "requests_per_second": metric(rate),
                "request_latency": metric(1.0),
            }
        }

    return {"benchmarks": [benchmark(30.0, 5.0, 1.0, 1.85), benchmark(90.0, 9.0, 20.0, 20.0)]}


def guide_rows(three: bool) -> str:
    """The same two runs in both shapes of the CSV."""
    names = [
        ("Run Info", "Run ID", "", "a"),
        ("Time to First Token", "Successful ms", "Mean", (30.0, 90.0)),
        ("Time to First Token", "Successful ms", "Median", (1.0, 1.0)),
        ("Time to First Token", "Errored ms", "Mean", (7e9, 7e9)),
        ("Inter Token Latency", "Successful ms", "Mean", (5.0, 9.0)),
        ("Server Throughput", "Successful Requests/Sec", "Mean", (1.85, 20.0)),
        ("Server Throughput", "Successful Concurrency", "Mean", (1.0, 20.0)),
        ("Token Metrics", "Successful Input Tokens", "Mean", (512.0, 512.0)),
        ("Token Metrics", "Successful Output Tokens", "Mean", (101.0, 101.0)),
    ]
    old = {
        "Successful Time to first token ms mean": (30.0, 90.0),
        "Successful Time to first token ms median": (1.0, 1.0),
        "Incomplete Time to first token ms mean": (7e9, 7e9),
        "Successful Inter token latency ms mean": (5.0, 9.0),
        "Successful Requests per second mean": (1.85, 20.0),
        "Successful Request concurrency mean": (1.0, 20.0),
        "Successful Prompt token count mean": (512.0, 512.0),
        "Successful Output token count mean": (101.0, 101.0),
    }
    out = io.StringIO()
    writer = csv.writer(out)
    if three:
        writer.writerows(list(zip(*(n[:3] for n in names), strict=True)))
        for i in (0, 1):
            writer.writerow([n[3][i] if isinstance(n[3], tuple) else n[3] for n in names])
    else:
        writer.writerow(["Type", *old])
        for i in (0, 1):
            writer.writerow(["generative", *(v[i] for v in old.values())])
    return out.getvalue()


@pytest.mark.parametrize("shape", ["json", "three rows", "one row"])
def test_guidellm_in_every_shape(tmp_path: Path, shape: str) -> None:
    if shape == "json":
        path = tmp_path / "benchmarks.json"
        path.write_text(json.dumps(guide_json()))
    else:
        path = tmp_path / "benchmarks.csv"
        path.write_text(guide_rows(three=shape == "three rows"))
    found = read_files([path])
    assert found.tools == ["GuideLLM"]
    assert [(r.tokens, r.milliseconds) for r in found.readings.prefill] == [(512, 30.0)]
    alone, busy = found.readings.decode
    assert alone.milliseconds == 5.0
    assert busy.milliseconds == pytest.approx(9.0 - 30.0 * 19 / 101)
    assert found.readings.decode[1].sequences == pytest.approx(18.0)


def test_files_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    for name, text in (("x.csv", "a,b\n1,2\n"), ("x.json", "{}"), ("y.json", "not json")):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidField, match="no known tool wrote it"):
            read_files([tmp_path / name])
    with pytest.raises(InvalidField, match="give a readable file"):
        read_files([tmp_path / "missing.csv"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidField, match=r"no \.npz below"):
        read_files([empty])
    report = guide_json()
    del report["benchmarks"][1]["metrics"]["output_token_count"]
    (tmp_path / "b.json").write_text(json.dumps(report))
    with pytest.raises(InvalidField, match="output tokens"):
        read_files([tmp_path / "b.json"])
