"""YAML as people mean it: `1e9` is a number, and a key that stands twice is an error.

Owns the two places where YAML 1.1, as the library reads it, surprises; what a person writes of a
policy is read here. Nothing but plain values comes out of it. Pure.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from readyplane.core.errors import InvalidField

WHY_CHARACTERS_MAX = 160
MERGE = "tag:yaml.org,2002:merge"
FLOAT = "tag:yaml.org,2002:float"
NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+\Z")
"""A number with an exponent as JSON and YAML 1.2 have it; YAML 1.1 wants a point and a sign."""


class _Twice(yaml.YAMLError):
    """A key that stands twice in one mapping."""

    def __init__(self, key: str, line: int, first_line: int) -> None:
        super().__init__(key)
        self.key, self.line, self.first_line = key, line, first_line


class _Loader(yaml.SafeLoader):
    """The safe loader with both corrected."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Looked at before keys of a merge (`<<`) are filled in, which a mapping may override.
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise _Twice(key.value, line, lines[key.tag, key.value])
            lines[key.tag, key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes a text that the loader would take for a number, as a tag `1234e56`."""


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(FLOAT, NUMBER, list("-+.0123456789"))


def read_yaml(text: str, *, field: str, value: object) -> Any:
    """The plain values of a YAML text.

    Args:
        field, value: what an error names: where the text came from.

    Raises:
        InvalidField: no YAML, more than plain values, or a key that stands twice, with its line.
    """
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except _Twice as twice:
        remedy = (
            f"line {twice.line}: the key {twice.key!r} stands in line {twice.first_line} already; "
            "keep one of them"
        )
        raise InvalidField(field, value, remedy) from twice
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).replace(' in "<unicode string>"', "").split())[
            :WHY_CHARACTERS_MAX
        ]
        raise InvalidField(field, value, f"write valid YAML ({why})") from error


def write_yaml(value: object) -> str:
    """A YAML text that `read_yaml` takes back as it was, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
