"""docs/cli.md says what `--help` says."""

from readyplane_lab.cli.reference import reference
from tests.tidy import tree


def test_the_page_of_the_command_is_fresh() -> None:
    remedy = "run: python -m readyplane_lab.cli.reference > docs/cli.md"
    assert tree.text("docs/cli.md") == reference(), remedy


def test_a_group_that_does_something_by_itself_is_on_the_page() -> None:
    own = reference().partition("\n## readyplane rollout\n")[2].partition("\n## ")[0]
    assert all(f"`{name}" in own for name in ("--to", "--surge", "--watch"))


def test_every_command_has_examples() -> None:
    sections = reference().split("\n## ")[1:]
    assert len(sections) >= 24
    for section in sections:
        name = section.partition("\n")[0]
        assert section.count(f"\n{name}") >= 2, f"{name}: usage, and an example at least"
