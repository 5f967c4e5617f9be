"""What is drawn from client rates has their rates, their burstiness and their lengths."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.servegen import (
    LEVELS,
    ServeGen,
    Window,
    read_servegen,
    renewals,
    servegen,
    servegen_day,
)

SHARED = Path(os.environ.get("READYPLANE_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (SHARED / "traces/servegen").exists(), reason=f"public traces are not at {SHARED}"
)
HOUR = Window(0.0, 3600.0)


def written(folder: Path, rates: str, lengths: str) -> tuple[Path, Path]:
    files = folder / "rates.csv.zst", folder / "lengths.csv.zst"
    for file, text in zip(files, (rates, lengths), strict=True):
        file.write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    return files


def quantiles(client: int, field: str, least: float, most: float, begin_s: int = 0) -> str:
    values = ",".join(f"{least + (most - least) * level:g}" for level in LEVELS.tolist())
    return f"{client},{begin_s},{field},0,{values}\n"


@pytest.fixture
def made(tmp_path: Path) -> ServeGen:
    """Client 1: steady and known; 2: bursty (Weibull) and known; 3: small, unknown, with a pause."""
    rates = "client,t_s,rate_rps,iat_cv,dist,p1,p2\n"
    rates += "".join(f"1,{t},10,1.0,Gamma,1,0.1\n" for t in range(0, 3600, 600))
    rates += "".join(f"2,{t},{5 + t / 600},4.0,Weibull,0.4,0.1\n" for t in range(0, 3600, 600))
    rates += "3,600,2.0,2.5,Gamma,0.16,3.1\n3,1800,0.0,1.0,Gamma,1,1\n"
    header = "client,window_start_s,field,mean," + ",".join(
        f"q{round(100 * level, 1):g}" for level in LEVELS.tolist()
    )
    lengths = f"{header}\n" + quantiles(1, "input_tokens", 100, 200)
    lengths += quantiles(1, "output_tokens", 10, 20)
    lengths += quantiles(2, "input_tokens", 1000, 2000) + quantiles(2, "output_tokens", 50, 60)
    return read_servegen("made", *written(tmp_path, rates, lengths))


def test_every_bin_has_its_rate(made: ServeGen) -> None:
    drawn = made.draw(HOUR, scale=1.0, seed=1)
    rates = np.bincount((drawn.at_s // 600).astype(int), minlength=6) / 600
    assert rates == pytest.approx(made.rates_rps(HOUR), abs=0.02)
    assert made.rates_rps(HOUR)[1] == pytest.approx(10 + 6 + 2)


@pytest.mark.parametrize("scale", [0.1, 0.013])
def test_thinned_clients_ask_less_often(made: ServeGen, scale: float) -> None:
    counts = [len(made.draw(HOUR, scale=scale, seed=s)) for s in range(20)]
    wanted = made.rates_rps(HOUR).sum() * 600 * scale
    assert np.mean(counts) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("weibull", [False, True])
@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_the_times_between_arrivals_vary_as_published(cv: float, weibull: bool) -> None:
    many, each = 20, 4000
    draws = np.random.Generator(np.random.Philox(key=3))
    counts = np.full(many, each)
    at = renewals(counts, np.full(many, cv), np.full(many, weibull), draws).reshape(many, each)
    gaps = np.diff(at, axis=1)
    found = gaps.std(axis=1) / gaps.mean(axis=1)
    assert np.median(found) == pytest.approx(cv, rel=0.12)
    assert (gaps >= 0).all() and at.min() >= 0 and at.max() < 1


def test_families_differ_where_their_variation_is_the_same() -> None:
    """A Gamma of CV 3 has far more tiny gaps than a Weibull of CV 3."""
    tiny = []
    for weibull in (False, True):
        draws = np.random.Generator(np.random.Philox(key=4))
        at = renewals(np.array([50_000]), np.array([3.0]), np.array([weibull]), draws)
        gaps = np.diff(at) * 50_000
        tiny.append((gaps < 1e-4).mean())
    assert tiny[0] > 2 * tiny[1]


def test_impossible_variation_is_bounded() -> None:
    draws = np.random.Generator(np.random.Philox(key=5))
    at = renewals(np.array([1, 5, 2]), np.array([800.0, 1e-4, 0.0]), np.array([0, 1, 0]), draws)
    assert len(at) == 8 and np.isfinite(at).all() and (at >= 0).all() and (at < 1).all()


def test_lengths_are_those_of_the_client_or_of_all_known_ones(made: ServeGen) -> None:
    drawn = made.draw(Window(600.0, 1200.0), scale=20.0, seed=2)
    assert set(np.unique(drawn.isl // 1000)) <= {0, 1, 2}
    short = drawn.isl <= 200
    assert short.sum() == pytest.approx(20 * 600 * (10 + 2 * 10 / 16.2), rel=0.05)
    assert np.quantile(drawn.isl[short], [0.1, 0.5, 0.9]) == pytest.approx([110, 150, 190], abs=3)
    assert ((drawn.osl >= 50) == ~short).all(), "what is read and written belong together"


def test_a_client_is_drawn_alike_whoever_else_is(made: ServeGen) -> None:
    one, two, _ = made.clients
    alone = ServeGen("alone", (two,), made.lengths).draw(HOUR, scale=1.0, seed=7)
    among = ServeGen("both", (two, one), made.lengths).draw(HOUR, scale=1.0, seed=7)
    own = among.isl >= 1000
    assert 0 < own.sum() < len(among)
    assert np.diff(among.at_s[own]) == pytest.approx(np.diff(alone.at_s), abs=1e-6)
    assert (among.isl[own] == alone.isl).all() and (among.osl[own] == alone.osl).all()


def test_it_is_a_function_of_the_seed(made: ServeGen) -> None:
    one, same, other = (made.draw(HOUR, scale=0.5, seed=s) for s in (1, 1, 2))
    assert (one.at_s == same.at_s).all() and (one.isl == same.isl).all()
    assert len(one) != len(other) or (one.at_s != other.at_s).any()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), 1e9])
def test_an_impossible_scale_is_refused(made: ServeGen, scale: float) -> None:
    with pytest.raises(InvalidField, match="scale"):
        made.draw(HOUR, scale=scale, seed=1)


def test_a_day_outside_is_refused() -> None:
    with pytest.raises(InvalidField, match="servegen day"):
        Window.of_day(13, from_h=20.0, hours=6.0)


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    files = written(tmp_path, "client,t_s\n1,0\n", "client\n1\n")
    with pytest.raises(InvalidField, match=r"rates\.csv\.zst: 'rate_rps'"):
        read_servegen("broken", *files)


def test_missing_data_says_where_to_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READYPLANE_DATA", str(tmp_path))
    with pytest.raises(InvalidField, match="READYPLANE_DATA"):
        servegen_day("m-large", 0, 1.0, 1)


@needs_data
@pytest.mark.parametrize("name, isl, osl", [("m-large", 834.6, 155.4), ("m-small", 86.8, 13.1)])
def test_public_rates_and_mean_lengths_come_out(name: str, isl: float, osl: float) -> None:
    """The means are those that the tables give, weighted by the known clients' rates."""
    fortnight = Window(0.0, 14 * 86_400.0)
    tables = servegen(name)
    rates = tables.rates_rps(fortnight)
    scale = 0.3 / rates.mean()
    drawn = tables.draw(fortnight, scale=scale, seed=1)
    assert drawn.isl.mean() == pytest.approx(isl, rel=0.08)
    assert drawn.osl.mean() == pytest.approx(osl, rel=0.15)
    daily = np.bincount((drawn.at_s // 86_400).astype(int), minlength=14)[:14]
    assert daily == pytest.approx(rates.reshape(14, -1).sum(axis=1) * 600 * scale, rel=0.03)


@needs_data
def test_empty_bins_stay_empty() -> None:
    """The log of m-small's day 10 has holes."""
    tables = servegen("m-small")
    day = Window.of_day(10)
    holes = np.flatnonzero(tables.rates_rps(day) == 0)
    assert len(holes) > 5
    drawn = tables.draw(day, scale=0.01, seed=1)
    counts = np.bincount((drawn.at_s // 600).astype(int), minlength=144)
    assert counts[holes].sum() == 0 and np.isfinite(drawn.at_s).all()


@needs_data
def test_a_drawn_day_is_a_sequence_of_requests() -> None:
    requests = servegen_day("m-large", 9, 0.001, 1)
    assert requests[0].at_s == 0.0
    assert list(requests)[5] == requests[5] == requests[3:7][2]
    assert requests[-1].index == len(requests) - 1
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    assert requests[5].parts != requests[6].parts
    with pytest.raises(IndexError):
        requests[len(requests)]


@needs_data
def test_a_label_is_the_client_and_changes_nothing_else() -> None:
    plain, labelled = (servegen_day("m-large", 9, 0.001, 1, labelled=yes) for yes in (False, True))
    assert [replace(r, tenant="") for r in labelled] == list(plain)
    assert {r.tenant for r in plain} == {""}
    assert labelled[7].tenant == f"client-{labelled.columns.client[7]}" == list(labelled)[7].tenant
    assert len({r.tenant for r in labelled}) > 20
