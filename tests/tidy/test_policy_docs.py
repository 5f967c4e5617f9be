"""docs/policy.md says what the schema says, and every field is explained."""

from readyplane_lab.cli.policy_reference import POOL, TEXTS, reference, rows
from readyplane_planner.policy import read_policy
from tests.tidy import tree


def test_the_page_of_the_policy_is_fresh() -> None:
    remedy = "run: python -m readyplane_lab.cli.policy_reference > docs/policy.md"
    assert tree.text("docs/policy.md") == reference(), remedy


def test_every_field_has_a_sentence_and_every_sentence_a_field() -> None:
    keys = {row.key for row in rows()}
    own = {key.replace(f"{POOL}.", "decode.", 1) for key in keys}
    missing = {k for k in keys if k not in TEXTS and k.replace(POOL, "decode", 1) not in TEXTS}
    assert not missing, f"write a sentence in policy_reference.TEXTS for {sorted(missing)}"
    assert not set(TEXTS) - keys - own, "these sentences have no field"


def test_every_default_is_the_one_in_force() -> None:
    """What the page calls a default is what an untouched policy has."""
    document = read_policy({"model": "m"}).document()
    shown = {row.name: row.default for row in rows() if "[]" not in row.name}
    for name, default in shown.items():
        value: object = document
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None and name.startswith("rollout.asked."):
            continue  # nobody has asked for anything
        if isinstance(value, bool) or value is None:
            assert default in {str(value).lower(), "null", "needed"}, name
        elif isinstance(value, int | float):
            assert float(default) == value, name
