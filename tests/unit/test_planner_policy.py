"""The policy: a typo is never ignored, an impossible combination is never saved."""

from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, NotFound, UnknownField
from readyplane_planner.policy import make_plan, merged, read_policy
from readyplane_planner.policy_file import load_policy

GOOD: dict[str, Any] = {"model": "demo"}


def test_defaults_are_a_policy() -> None:
    policy = read_policy(GOOD)
    assert read_policy(policy.document()) == policy
    assert policy.digest == read_policy(policy.document()).digest
    assert policy.reference == "demo"
    plan = make_plan(policy, version=4, manifest_digest="sha256:x")
    assert (plan.version, plan.manifest_digest, plan.paused) == (4, "sha256:x", False)
    assert plan.prefill.limits.high == 8 and plan.prefill.profile.worker_class == "h200"


@pytest.mark.parametrize(
    ("document", "field", "remedy"),
    [
        ({"max_step": 2}, "policy.max_step", "policy.up.max_step or policy.down.max_step"),
        ({"ttft_s": 1.0}, "policy.ttft_s", "it belongs to policy.slo.ttft_s"),
        ({"up": {"window_s": 5.0}}, "policy.up.window_s", "policy.down.window_s"),
        ({"prefil": {"min": 1}}, "policy.prefil", "did you mean policy.prefill?"),
        ({"prefill": {"minimum": 1}}, "policy.prefill.minimum", "min"),
        ({"zzz": 1}, "policy.zzz", "remove it"),
    ],
)
def test_an_unknown_field_is_named_with_its_place(
    document: dict[str, Any], field: str, remedy: str
) -> None:
    """B167: misspelt or misplaced fields are refused, with the right place."""
    with pytest.raises(UnknownField) as caught:
        read_policy({**GOOD, **document})
    assert caught.value.field == field
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"prefill": {"min": 9, "max": 3}}, "policy.prefill.min"),
        ({"decode": {"min": -1}}, "policy.decode.min"),
        ({"decode": {"max": 10**9}}, "policy.decode.max"),
        ({"manifest": "x" * 513}, "policy.manifest"),
        ({"slo": {"ttft_s": 0}}, "policy.slo.ttft_s"),
        ({"slo": {"ttft_s": float("nan")}}, "policy.slo.ttft_s"),
        ({"slo": {"tpot_s": float("inf")}}, "policy.slo.tpot_s"),
        ({"slo": {"tpot_s": "0.1"}}, "policy.slo.tpot_s"),
        ({"prefill": {"max": True}}, "policy.prefill.max"),
        ({"prefill": {"max": 2.5}}, "policy.prefill.max"),
        ({"paused": "yes"}, "policy.paused"),
        ({"start_mode": "fast"}, "policy.start_mode"),
        ({"forecast_quantile": 1.0}, "policy.forecast_quantile"),
        ({"t_ready_prior": {"p50_s": 50.0, "p90_s": 10.0}}, "policy.t_ready_prior"),
        ({"forecast": {"window_s": 30.0}}, "policy.down.cooldown_s"),
        ({"down": {"cooldown_s": 1.0}}, "policy.down.cooldown_s"),
        ({"forecast": {"window_s": 1.0}}, "policy.forecast.window_s"),
        ({"budget_gpus": 1}, "policy.budget_gpus"),
        ({"prefill": {"worker_class": "h100"}}, "policy.prefill.worker_class"),
        ({"model": ""}, "policy.model"),
        ({"tick_s": 0}, "policy.tick_s"),
    ],
)
def test_a_wrong_value_or_combination_is_refused(document: dict[str, Any], field: str) -> None:
    """B32, B168: cooldowns below the look-back, bounds upside down, budgets below the minimum."""
    with pytest.raises(InvalidField) as caught:
        read_policy({**GOOD, **document})
    assert caught.value.field == field
    assert caught.value.remedy


def test_missing_model_and_unknown_profile() -> None:
    with pytest.raises(InvalidField, match=r"policy\.model"):
        read_policy({})
    with pytest.raises(NotFound, match="profile"):
        read_policy({**GOOD, "prefill": {"profile": "b999"}})


def test_look_back_never_outlives_a_cooldown() -> None:
    """B32: short cooldowns shorten the look-back unless one is asked for."""
    assert read_policy(GOOD).window_s == 10.0
    quick = {**GOOD, "tick_s": 1.0, "down": {"cooldown_s": 3.0, "window_s": 5.0, "hold_s": 6.0}}
    assert read_policy(quick).window_s == 3.0


def test_merge_changes_only_what_is_given() -> None:
    policy = read_policy({**GOOD, "prefill": {"min": 2, "max": 5}})
    changed = merged(policy, {"prefill": {"max": 7}, "budget_gpus": None})
    assert (changed.prefill.min, changed.prefill.max) == (2, 7)
    with pytest.raises(UnknownField):
        merged(policy, {"prefill": {"maximum": 7}})
    with pytest.raises(InvalidField):
        merged(policy, {"prefill": 7})


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: demo\nup: {max_step: 3}\n")
    (tmp_path / "a.json").write_text('{"model": "demo", "up": {"max_step": 3}}')
    assert load_policy(tmp_path / "a.yaml") == load_policy(tmp_path / "a.json")
    for name, text in (
        ("b.yaml", "- 1\n"),
        ("c.yaml", "a: [\n"),
        ("d.json", '{"model": "demo", "model": "x"}'),
        ("e.yaml", "model: !!python/object/apply:os.getcwd []\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidField):
            load_policy(tmp_path / name)
    with pytest.raises(InvalidField, match="--policy"):
        load_policy(tmp_path / "missing.yaml")
