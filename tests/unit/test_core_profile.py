"""What the shipped profile says, and that more work never takes less time."""

import json
import math
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile, LinkClass

DOCUMENT: dict[str, Any] = json.loads(
    (files("readyplane.profiles") / "h200-llama8b-fp8.json").read_text()
)
H200 = ClassProfile.from_document(DOCUMENT)
SLOW = ClassProfile.from_document({**DOCUMENT, "slow_factor": 10})
tokens = st.floats(0, 200_000)


def test_the_shipped_profile_fits_its_points() -> None:
    assert H200.fit_error < 0.1
    for isl, millis in H200.prefill_points:
        assert H200.prefill_s(isl) >= millis / 1000 - 1e-12
    assert all(c >= 0 for c in H200.decode_coefficients_s())


def test_the_document_comes_back() -> None:
    again = ClassProfile.from_document(json.loads(json.dumps(SLOW.document())))
    assert again == SLOW
    assert again.digest == SLOW.digest != H200.digest


def test_demo_figures() -> None:
    """The demo's class: a conversation prompt in about 0.39 s, about 67 sequences at 0.1 s."""
    assert SLOW.prefill_s(1155) == pytest.approx(0.39, abs=0.02)
    assert SLOW.decode_sequences(tpot_s=0.1, context=1300) == pytest.approx(67, abs=5)
    assert SLOW.decode_tokens_per_s(tpot_s=0.1, context=1300) == pytest.approx(670, abs=50)


@given(tokens, tokens)
def test_prefill_is_monotone(left: float, right: float) -> None:
    low, high = sorted((left, right))
    assert H200.prefill_s(low) <= H200.prefill_s(high) + 1e-12
    assert math.isfinite(H200.prefill_s(high))


@given(tokens, st.floats(0, 100_000))
def test_a_cached_prefix_never_makes_the_rest_cheaper_than_alone(new: float, cached: float) -> None:
    assert H200.prefill_s(new, cached) >= H200.prefill_s(new) - 1e-12
    assert H200.prefill_s(new, cached) <= H200.prefill_s(new + cached) + 1e-9 or cached == 0


def test_no_tokens_take_no_time() -> None:
    assert H200.prefill_s(0) == 0.0
    assert H200.prefill_s(0, cached=5_000) == 0.0
    assert H200.prefill_s(-1) == 0.0


def test_beyond_the_points_the_last_slope_goes_on() -> None:
    last = H200.prefill_points[-1][0]
    at, step = H200.prefill_s(last), 10_000
    one, two = H200.prefill_s(last + step), H200.prefill_s(last + 2 * step)
    assert two - one == pytest.approx(one - at)
    assert (one - at) / step >= at / last * 0.5


@given(st.floats(0, 500), st.floats(0, 1e6), st.floats(0, 500), st.floats(0, 1e6))
def test_iterations_grow_with_sequences_and_kv(a: float, b: float, c: float, d: float) -> None:
    low = H200.iteration_s(min(a, c), min(b, d))
    assert 0 < low <= H200.iteration_s(max(a, c), max(b, d))


@given(st.floats(0.001, 1.0), st.floats(1, 200_000))
def test_the_most_sequences_keep_the_target_and_the_bounds(tpot_s: float, context: float) -> None:
    for profile in (H200, SLOW):
        most = profile.decode_sequences(tpot_s=tpot_s, context=context)
        assert 0 <= most <= profile.max_num_seqs
        assert most * context <= profile.kv_capacity_tokens * (1 + 1e-9)
        if most > 0:
            assert profile.iteration_s(most, most * context) <= tpot_s * (1 + 1e-9)
        rate = profile.decode_tokens_per_s(tpot_s=tpot_s, context=context)
        assert (rate > 0) == (most > 0)


def test_the_slow_factor_scales_every_time() -> None:
    assert SLOW.prefill_s(3_000, 500) == pytest.approx(10 * H200.prefill_s(3_000, 500))
    assert SLOW.iteration_s(40, 50_000) == pytest.approx(10 * H200.iteration_s(40, 50_000))
    assert SLOW.prefill_tokens_per_s(1155) == pytest.approx(H200.prefill_tokens_per_s(1155) / 10)
    assert SLOW.fit_error == pytest.approx(H200.fit_error)


points = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 500_000), st.floats(0.5, 500.0)),
    min_size=2,
    max_size=20,
)


@given(points)
def test_the_fit_is_as_good_as_non_negative_least_squares(
    rows: list[tuple[int, int, float]],
) -> None:
    """Compared with scipy's, which processes that must start fast do without."""
    profile = ClassProfile.from_document({**DOCUMENT, "decode_points": [list(r) for r in rows]})
    design = np.array([[1.0, r[0], r[1]] for r in rows])
    scale = design.max(axis=0)
    target = np.array([r[2] for r in rows])
    _, residual = nnls(design / scale, target)
    found = np.array(profile.decode_coefficients_s()) * 1000.0
    assert (found >= 0).all()
    error = float(np.linalg.norm(design @ found - target))
    assert error <= residual * (1 + 1e-6) + 1e-6 * float(np.linalg.norm(target))


@given(st.floats(0.1, 400_000))
def test_between_measured_points_time_is_linear(at: float) -> None:
    x, y = zip(*H200.prefill_points, strict=True)
    if at <= x[-1]:
        wanted = np.interp(at, x, np.maximum.accumulate(y)) / 1000.0
        assert H200.prefill_s(at) == pytest.approx(float(wanted))
    else:
        assert H200.prefill_s(at) > y[-1] / 1000.0


def test_sharers_divide_a_link() -> None:
    link = LinkClass("rdma", 50e9, 0.001)
    assert link.transfer_s(50e9) == 1.001
    assert link.transfer_s(50e9, sharers=4) == 4.001
    assert link.transfer_s(0, sharers=0) == 0.001


BREAKS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.update(gpu=1), "profile.gpu"),
    (lambda d: d.pop("name"), "profile.name"),
    (lambda d: d.update(gpus=0), "profile.gpus"),
    (lambda d: d.update(gpus=True), "profile.gpus"),
    (lambda d: d.update(kv_capacity_tokens="many"), "profile.kv_capacity_tokens"),
    (lambda d: d.update(slow_factor=float("nan")), "profile.slow_factor"),
    (lambda d: d.update(price_per_gpu_hour=-1), "profile.price_per_gpu_hour"),
    (lambda d: d.update(prefill_points=[[1, 1]]), "profile.prefill_points"),
    (lambda d: d.update(prefill_points=[[2, 1], [1, 2]]), "profile.prefill_points"),
    (lambda d: d.update(prefill_points=[[1, 1], [2]]), "profile.prefill_points[1]"),
    (lambda d: d.update(decode_points=[[1, 1, 1], [1, 1, 0]]), "profile.decode_points[1]"),
    (lambda d: d.update(decode_points=None), "profile.decode_points"),
]


@pytest.mark.parametrize(
    "change, field", BREAKS, ids=[f"{i}-{f}" for i, (_, f) in enumerate(BREAKS)]
)
def test_a_broken_profile_names_its_field(
    change: Callable[[dict[str, Any]], Any], field: str
) -> None:
    doc = json.loads(json.dumps(DOCUMENT))
    change(doc)
    with pytest.raises(InvalidField) as caught:
        ClassProfile.from_document(doc)
    assert caught.value.field == field
