"""What is wrong with a document of fields, in our words: the field, its value, what to write instead.

Owns the sentence for each fault that a schema can find, and the place where a misspelled or misplaced
field belongs. Pure; whoever reads such a document turns the schema's complaint into an error here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel, ValidationError

from readyplane.core.errors import InvalidField, UnknownField

NEAR = 0.7
"""How alike two names have to be for one to be the other's misspelling, 0 to 1."""

REMEDIES = {
    "bool_type": "write true or false",
    "dict_type": "write an object of fields",
    "finite_number": "write a finite number",
    "float_type": "write a number",
    "greater_than": "write more than {gt}",
    "greater_than_equal": "write {ge} or more",
    "int_from_float": "write a whole number, without a point or an exponent",
    "int_type": "write a whole number",
    "less_than": "write less than {lt}",
    "less_than_equal": "write {le} or less",
    "list_type": "write a list",
    "literal_error": "write {expected}",
    "missing": "it must be given",
    "string_too_long": "write at most {max_length} characters",
    "string_too_short": "write a text that is not empty",
    "string_type": "write a text, in quotes where it looks like something else",
    "too_long": "name at most {max_length}",
    "too_short": "name at least {min_length}",
    "tuple_type": "write a list",
}
"""By the schema's name of a fault; the bounds that it carries are filled in."""


def named(error: ValidationError, schema: type[BaseModel], *, root: str) -> InvalidField:
    """The first fault, a misspelled name before all: others may only follow from it.

    Args:
        root: what the document is called, as `policy`.
    """
    found = error.errors()
    first = next((f for f in found if f["type"] == "extra_forbidden"), found[0])
    path = ".".join([root, *(str(part) for part in first["loc"])])
    value, kind = first.get("input"), first["type"]
    if kind == "extra_forbidden":
        return UnknownField(path, value, _place_of(path, schema, root))
    if kind == "missing":
        return InvalidField(path, None, REMEDIES[kind])
    if kind in {"model_type", "model_attributes_type", "dataclass_type"}:
        here = list(_below(_section(path), schema, root))
        return InvalidField(path, value, f"write an object of fields: {', '.join(here)}")
    context = {
        name: f"{bound:g}" if isinstance(bound, float) else bound
        for name, bound in first.get("ctx", {}).items()
    }
    # A fault that no field of ours can have today is still told without a foreign sentence.
    remedy = REMEDIES.get(kind, "write a value that its documentation allows").format_map(context)
    return InvalidField(path, value, remedy)


def _place_of(path: str, schema: type[BaseModel], root: str) -> str:
    """Where a field that is unknown here belongs: its name, wherever it is; else the nearest name,
    of its own section before any other.
    """
    known = list(_paths(schema, root))
    leaf, parent = path.rpartition(".")[2], _section(path.rpartition(".")[0])
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        return f"it belongs to {' or '.join(same)}"
    here = list(_below(parent, schema, root))
    near = difflib.get_close_matches(leaf, here, n=1, cutoff=NEAR)
    if near:
        return f"did you mean {parent}.{near[0]}?"
    leaves: dict[str, list[str]] = {}
    for place in known:
        leaves.setdefault(place.rpartition(".")[2], []).append(place)
    near = difflib.get_close_matches(leaf, leaves, n=1, cutoff=NEAR)
    if near:
        return f"did you mean {' or '.join(leaves[near[0]])}?"
    return f"remove it; {parent} has {', '.join(here)}" if here else "remove it"


def _section(path: str) -> str:
    """The path without the places in lists: all entries of a list have the same fields."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def _below(parent: str, schema: type[BaseModel], root: str) -> Iterator[str]:
    for place in _paths(schema, root):
        above, _, leaf = place.rpartition(".")
        if above == parent:
            yield leaf


def _paths(schema: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in schema.model_fields.items():
        yield f"{prefix}.{name}"
        inner = info.annotation
        for part in (inner, *get_args(inner)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _paths(part, f"{prefix}.{name}")
