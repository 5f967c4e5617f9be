"""What is wrong with a policy is told in our words, wherever it was written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from readyplane.core.errors import InvalidField, NotFound, UnknownField
from readyplane_lab.cli.policy import parse_changes
from readyplane_planner.policy import Policy, read_policy
from readyplane_planner.policy_file import load_policy
from readyplane_planner.signal_sources import load_signals
from readyplane_planner.whatif import read_changes
from readyplane_planner.yaml_text import read_yaml, write_yaml

GOOD: dict[str, Any] = {"model": "demo"}
FOREIGN = ("input should", "value error", "extra inputs", "validat", "string should", "list should")


@pytest.mark.parametrize(
    ("document", "near"),
    [
        ({"prefill": {"maxx": 3}}, "policy.prefill.max?"),
        ({"decode": {"maxx": 3}}, "policy.decode.max?"),
        ({"decode": {"classes": [{"proffile": "x"}]}}, "policy.decode.classes.profile?"),
        ({"up": {"max_stepp": 3}}, "policy.up.max_step?"),
        ({"down": {"max_stepp": 3}}, "policy.down.max_step?"),
        ({"headrom": 3}, "policy.headroom?"),
        ({"atainment": 3}, "policy.slo.attainment?"),
        ({"max_stepp": 3}, "policy.up.max_step or policy.down.max_step?"),
    ],
)
def test_the_nearest_name_of_the_same_section_comes_first(
    document: dict[str, Any], near: str
) -> None:
    with pytest.raises(UnknownField) as caught:
        read_policy({**GOOD, **document})
    assert caught.value.remedy == f"did you mean {near}"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"prefill": {"max": 2.5}}, "policy.prefill.max: 2.5 is not valid; write a whole number"),
        ({"prefill": {"max": "2"}}, "policy.prefill.max: '2' is not valid; write a whole number"),
        ({"prefill": {"max": 1025}}, "write 1024 or less"),
        ({"slo": {"ttft_s": "2s"}}, "policy.slo.ttft_s: '2s' is not valid; write a number"),
        ({"slo": {"ttft_s": 0.0}}, "write more than 0"),
        ({"slo": {"quantile": 0.4}}, "write 0.5 or more"),
        ({"slo": {"ttft_s": float("nan")}}, "write a finite number"),
        ({"slo": 3}, "write an object of fields: ttft_s, tpot_s, quantile, attainment"),
        ({"start_mode": "cold"}, "write 'auto', 'eager', 'jit' or 'aot'"),
        ({"paused": "yes"}, "write true or false"),
        ({"optimiser": "x" * 65}, "write at most 64 characters"),
        ({"nodes": {}}, "write a list"),
        ({"nodes": [{"gpus": 1}]}, "policy.nodes.0.name: None is not valid; it must be given"),
    ],
)
def test_a_refusal_names_field_value_and_remedy(document: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_policy({**GOOD, **document})
    assert said in str(caught.value)


def fields(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, info in model.model_fields.items():
        yield (*above, name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields(info.annotation, (*above, name))


def refusal_of(document: dict[str, Any]) -> InvalidField | None:
    """How it is refused; None for a policy, and for a profile or optimiser that is not found."""
    try:
        read_policy(document)
    except InvalidField as error:
        return error
    except NotFound:
        pass
    return None


def test_no_field_is_refused_in_foreign_words() -> None:
    odd: tuple[Any, ...] = (None, True, "x" * 9999, -1, 1e300, float("inf"), [1], ["x"], {"x": 1})
    refused = 0
    for place in fields(Policy):
        for value in odd:
            document = value
            for name in reversed(place):
                document = {name: document}
            error = refusal_of({**GOOD, **document})
            if error is None:
                continue
            refused += 1
            assert error.field.startswith(f"policy.{place[0]}")
            said = error.remedy.lower()
            assert said and not any(words in said for words in FOREIGN), str(error)
            assert "documentation" not in said, str(error)
    assert refused > 400


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1e-3", 0.001),
        ("-2E+3", -2000.0),
        (".5e1", 5.0),
        ("12", 12),
        ("1.5", 1.5),
        ("1e", "1e"),
        ("e9", "e9"),
        ("1e9x", "1e9x"),
        ("'1e9'", "1e9"),
    ],
)
def test_a_number_with_an_exponent_is_a_number(text: str, value: object, tmp_path: Path) -> None:
    found = read_yaml(f"a: {text}", field="f", value="v")["a"]
    assert found == value and type(found) is type(value)
    assert parse_changes([f"slo.ttft_s={text}"]) == {"slo": {"ttft_s": value}}
    (change,) = read_changes({"policy.headroom": text})
    assert change.value == value
    if isinstance(value, float) and value > 0:
        path = tmp_path / "p.yaml"
        path.write_text(f"model: demo\nprior_lengths: {{isl: 1e3, osl: 2e+2}}\nheadroom: {1e-1}\n")
        assert load_policy(path).prior_lengths.isl == 1000.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "model: demo\nup: {max_step: 1}\nup: {max_step: 2}\n",
            "line 3: the key 'up' stands in line 2",
        ),
        (
            "model: demo\nup:\n  max_step: 1\n  hold_s: 1\n  max_step: 2\n",
            "line 5: the key 'max_step'",
        ),
        ("model: demo\nup: {max_step: 1, max_step: 1}\n", "line 2: the key 'max_step'"),
        ("model: demo\nnodes: [{name: a, name: b}]\n", "line 2: the key 'name'"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(InvalidField) as caught:
        load_policy(path)
    assert caught.value.value == str(path) and caught.value.remedy.startswith(said)


def test_a_merged_key_may_be_overridden_and_a_bad_text_is_named(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: *a\n"
    assert read_yaml(text, field="f", value="v")["b"] == {"x": 3, "y": 2}
    for bad in ("2024-13-45", "a: [", "!!python/object:os.x {}"):
        with pytest.raises(InvalidField, match="write valid YAML"):
            read_yaml(bad, field="f", value="v")
    path = tmp_path / "s.yaml"
    path.write_text("prometheus: {url: 3}\n")
    with pytest.raises(InvalidField) as caught:
        load_signals(path)
    assert caught.value.value == "***" and caught.value.remedy.startswith("write a text")


@pytest.mark.parametrize("text", ["1234e56", "1e9", "12", "on", "x"])
def test_a_text_that_looks_like_a_number_stays_one(text: str) -> None:
    assert read_yaml(write_yaml({"manifest": text}), field="f", value="v") == {"manifest": text}
    with pytest.raises(InvalidField, match=r"policy\.manifest.*in quotes"):
        read_policy({**GOOD, "manifest": 1e9})
