"""The canonical form against a second implementation written from its description, and golden digests."""

import hashlib
import json
import unicodedata
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from readyplane.core.canonical import DIGITS_MAX, canonical, digest_of, parse
from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest
from readyplane_registry.catalog import read_document
from tests.registry_data import document, file_entry

# ------------------------------------------------------------------- the second implementation
# Written from the module's description alone: an explicit stack, its own escapes, its own decimals.

SHORT = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


def second_text(text: str) -> str:
    out = ['"']
    for character in unicodedata.normalize("NFC", text):
        code = ord(character)
        out.append(SHORT.get(code, f"\\u{code:04x}" if code < 32 else character))
    return "".join(out) + '"'


def shortest(value: float) -> str:
    """The nearest of the shortest decimals that read back, as d.ddde+dd."""
    exact = Decimal(value)
    for digits in range(1, 18):
        near = []
        for rounding in (ROUND_FLOOR, ROUND_CEILING):
            told = Context(prec=digits, rounding=rounding).plus(exact)
            if float(told) == value:
                near.append((abs(told - exact), told))
        if near:
            return f"{min(near)[1]:e}"
    raise AssertionError(value)


def second_number(value: float) -> str:
    """Shortest digits that read back, laid out with an exponent below 1e-4 and from 1e16 on."""
    told = shortest(value)
    mantissa, _, exponent = told.partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    digits = mantissa.lstrip("-").replace(".", "").rstrip("0") or "0"
    power = int(exponent)
    if digits == "0":
        return "0"
    if power >= len(digits) - 1:  # integral: an integer, and exactly the one that the double is
        whole, scale = value.as_integer_ratio()
        assert scale == 1
        return f"{whole:d}"
    if whole_number(value):
        return f"{value.as_integer_ratio()[0]:d}"
    if -4 <= power < 16:
        if power < 0:
            return f"{sign}0.{'0' * (-power - 1)}{digits}"
        return f"{sign}{digits[: power + 1]}.{digits[power + 1 :]}"
    point = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{point}e{'-' if power < 0 else '+'}{abs(power):02d}"


def whole_number(value: float) -> bool:
    return value.as_integer_ratio()[1] == 1


def second(value: Any) -> bytes:
    """Depth first with a stack of pieces still to be written."""
    out: list[str] = []
    left: list[tuple[bool, Any]] = [(False, value)]
    while left:
        ready, item = left.pop()
        if ready:
            out.append(item)
        elif item is None or isinstance(item, bool):
            out.append({None: "null", True: "true", False: "false"}[item])
        elif isinstance(item, str):
            out.append(second_text(item))
        elif isinstance(item, float):
            out.append(second_number(item))
        elif isinstance(item, int):
            out.append(f"{item:d}")
        elif isinstance(item, dict):
            named = sorted((unicodedata.normalize("NFC", key), one) for key, one in item.items())
            pieces: list[tuple[bool, Any]] = [(True, "{")]
            for place, (key, one) in enumerate(named):
                pieces.append((True, ("," if place else "") + second_text(key) + ":"))
                pieces.append((False, one))
            left.extend(reversed([*pieces, (True, "}")]))
        else:
            pieces = [(True, "[")]
            for place, one in enumerate(item):
                pieces += [(True, ","), (False, one)] if place else [(False, one)]
            left.extend(reversed([*pieces, (True, "]")]))
    return "".join(out).encode()


characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers() | st.integers(2**53, 2**80) | st.integers(-(2**80), -(2**53))
leaves = st.none() | st.booleans() | whole | numbers | texts
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        texts.map(lambda t: unicodedata.normalize("NFC", t)), inner, max_size=4
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400)
@given(values)
@example([-0.0, 0.0, 1.0, 1e-7, 0.0000001, 1e-5, 1e-4, 1e15 + 0.5, 1e16, 1e22, 5e-324, 1.7e308])
@example({"\U0001f600": 1, "\ufffd": 2, "e\u0301": 3, "\x7f\x1f\u2028": '\\"/\b\f'})
def test_two_implementations_give_the_same_bytes(value: Any) -> None:
    assert canonical(value) == second(value)
    assert digest_of(value) == "sha256:" + hashlib.sha256(second(value)).hexdigest()


@settings(max_examples=300)
@given(numbers)
def test_two_implementations_agree_on_every_double(value: float) -> None:
    assert canonical(value) == second(value)
    assert parse(canonical(value)) == value


@settings(max_examples=200)
@given(values)
def test_the_form_is_json_and_reading_it_back_changes_nothing(value: Any) -> None:
    data = canonical(value)
    assert canonical(parse(data)) == data
    assert canonical(json.loads(data)) == data


# --------------------------------------------------------------------------------------- golden

GOLDEN: list[tuple[Any, str]] = [
    (None, "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"),
    ({"a": 1.0, "b": -0.0, "c": 1e-7}, "90c8aca28b8ff1b8cb60f47a3174c3dfd451df2e807deaad86f7d278a8bd7550"),
]  # fmt: skip


def weights_golden() -> dict[str, Any]:
    return document("golden", salt="\u00e9")


def quantised_golden() -> dict[str, Any]:
    made = document("golden", quantisation="fp8")
    made["scales"] = {"granularity": "block", "dtype": "F32", "group": [128, 128]}
    return made


def other_golden(kind: str, **fields: Any) -> dict[str, Any]:
    made = document("golden", kind=kind, capability="sm90", **fields)
    del made["tensors"], made["config"]
    return made


MANIFESTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "weights": (weights_golden, "sha256:1475813b67a1c29b62123d552c345ea5377e147da784520da814be19c3f46ed0"),
    "quantised": (quantised_golden, "sha256:820014aacee59cae2cf822422b53dcf8e188ed4d3cf087b741f57f6178f7cdfd"),
    "compile": (
        lambda: other_golden("compile", loader_version="vllm/0.28.0", key={"driver": "580.1"}),
        "sha256:ad854a352f0fff8c6451953b02956e21fdfae78ef3117299127179fd97e699d9",
    ),
    "engine": (
        lambda: other_golden(
            "engine",
            loader_version="tensorrt_llm/1.2.0",
            layout="trtllm/7",
            key={"weights": "sha256:" + "a" * 64},
        ),
        "sha256:890f3696b705b9445036f139d5d1d2b802e3f700d31e84475065770cf095b23b",
    ),
    "kv_profile": (
        lambda: other_golden("kv_profile", loader_version="vllm/0.28.0", key={"gpu": "H200"}),
        "sha256:b4a1e104f9a964f98d08777352a8c3e01eeba1e442e4131fa6d4f3b5c07ae830",
    ),
    "ranked files": (
        lambda: other_golden(
            "engine",
            schema="readyplane/manifest/2",
            loader_version="tensorrt_llm/1.2.0",
            layout="trtllm/7",
            key={"weights": "sha256:" + "a" * 64},
            parallel={"tp": 2},
            files=[
                {**file_entry(f"rank{rank}.engine", bytes([rank]) * 9), "ranks": [rank]}
                for rank in (1, 0)
            ],
        ),
        "sha256:da60d2affe81bee315574e2e2aff49267a98d4cdc65b8e483fdb4a242e0b34e5",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("value", "digest"), GOLDEN)
def test_golden_values(value: Any, digest: str) -> None:
    """Written down once: another digest would be another identity for everything published."""
    assert digest_of(value) == f"sha256:{digest}"


@pytest.mark.parametrize("name", MANIFESTS)
def test_golden_manifests_of_every_kind(name: str) -> None:
    made, digest = MANIFESTS[name]
    manifest, data = read_document(made())
    assert manifest.digest == "sha256:" + hashlib.sha256(data).hexdigest() == digest
    assert data == second(manifest.document())
    assert Manifest.from_document(parse(data)) == manifest


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9007199254740993", 2**53 + 1),
        ("9007199254740992.0", 2**53),
        ("5.546946409472913e+16", 55469464094729128),
        ("1e3", 1000),
        ("0.0000001", 1e-7),
        ("-0.0", 0),
        ("1e-400", 0),
    ],
)
def test_a_number_is_what_it_says_however_it_is_written(text: str, value: float) -> None:
    assert canonical(parse(text)) == canonical(value)


@pytest.mark.parametrize(
    "text", ["1e400", "-1e400", "[1e99999999999]", "1" * 5000, f"0.{'1' * 5000}"]
)
def test_a_number_beyond_every_bound_is_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidField):
        parse(text)


def test_what_cannot_be_written_is_refused_in_words() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "\ud800", {"\udfff": 1}, 10**DIGITS_MAX, -(10**DIGITS_MAX)):
        with pytest.raises(InvalidField):
            canonical(value)
    assert canonical(10**DIGITS_MAX - 1) == b"9" * DIGITS_MAX
