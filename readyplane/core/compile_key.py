"""The key of compiled code: which factors it depends on, and what two keys differ in (R12). Pure.

Owns the declared factors, the table of one start and its digest. What could not be found out is
told apart from what is not there: the first makes the key unusable, which is a miss with a name;
the second is a value like any other. Handed to the agent, which looks at the real environment, and
to `kv_profile`, whose fingerprint begins with this key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from readyplane.core.compile_environment import review_environment
from readyplane.core.identity import FieldDifference, digest_of

SCHEMA = "readyplane/compile-key/1"
ABSENT = "absent"
NOTHING = "nothing"
VALUE_CHARS_MAX = 2000
# Every start has to say something about each of these; others may be added by an engine.
FACTORS: Final = (
    "model_structure",
    "model_code",
    "runtime_config",
    "engine",
    "engine_version",
    "framework",
    "compiler",
    "cuda",
    "driver",
    "device",
    "capability",
    "sm_count",
    "mig",
    "host",
    "python",
    "dtype",
    "kv_dtype",
    "quantisation",
    "attention_backend",
    "tp",
    "pp",
    "ep",
    "dp",
    "rank",
    "mode",
    "captured_shapes",
    "speculative",
)
# At the beginning, after what separates words, or glued to a compiler's flag (`-I/x`).
_PATH = re.compile(r"(?:^|[=:,;\s\"']|-(?:I|L|B|F|isystem))(?:~|\.{1,2})?/[^/\s]")


@dataclass(frozen=True, slots=True)
class Seen:
    """One observation of the environment.

    Attributes:
        value: what was found; None when nothing was.
        problem: why it could not be found out; empty when somebody looked and it is not there.
    """

    value: str | None = None
    problem: str = ""


def known(value: object) -> Seen:
    """Something was found. An empty text is nothing that was found."""
    text = str(value)
    return Seen(text) if text.strip() else Seen(None, "empty")


def absent() -> Seen:
    """Somebody looked, and there is no such thing here."""
    return Seen()


def unknown(problem: str) -> Seen:
    """It could not be found out."""
    return Seen(None, problem or "not known")


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """What an agent saw before its engine starts.

    Attributes:
        factors: by name; each of `FACTORS`, and whatever an engine adds.
        environment: the variables that the engine will have, all of them.
        contents: digest of what lies at a path that a variable or argument names.
    """

    factors: Mapping[str, Seen]
    environment: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompileKey:
    """The factor table of one start.

    Attributes:
        factors: name -> text, never empty; what is not there is `absent`.
        problems: factors that could not be found out, and why; such a key finds nothing and
            nothing is published under it.
    """

    factors: Mapping[str, str]
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """True when every factor is known."""
        return not self.problems

    @property
    def digest(self) -> str:
        """`sha256:<64 hex>` of the whole table."""
        return key_digest(self.factors)


def key_digest(factors: Mapping[str, str]) -> str:
    """Identity of a factor table: `sha256:<64 hex>`."""
    return digest_of({"schema": SCHEMA, "factors": dict(factors)})


def compile_key(facts: CompileFacts) -> CompileKey:
    """The table of everything that generated code depends on.

    A declared factor that nobody looked at, an empty variable and a path whose content is not
    known are problems; a factor or variable that is not declared counts like the others.
    """
    table: dict[str, str] = {}
    problems: dict[str, str] = {}
    for name in FACTORS:
        if name not in facts.factors:
            problems[name] = "nobody looked"
    for name, seen in facts.factors.items():
        _enter(name, seen, facts.contents, table, problems)
    for name, value in review_environment(facts.environment).counted.items():
        _enter(f"env.{name}", known(value), facts.contents, table, problems)
    return CompileKey(dict(sorted(table.items())), dict(sorted(problems.items())))


def _enter(
    name: str,
    seen: Seen,
    contents: Mapping[str, str],
    table: dict[str, str],
    problems: dict[str, str],
) -> None:
    if seen.value is None:
        if seen.problem:
            problems[name] = seen.problem
        else:
            table[name] = ABSENT
        return
    text = seen.value
    if names_path(text):
        # A path is where something is installed; what counts is what lies there.
        found = contents.get(text)
        if found is None:
            problems[name] = "names a path whose content is not known"
            return
        text = f"content:{found}"
    try:
        text.encode()
    except UnicodeEncodeError:
        text = ascii(text)  # bytes of a variable that are no text, still one value each
    if len(text) > VALUE_CHARS_MAX:
        text = f"long:{digest_of(text)}"
    # A variable may really be called so; it must not pass for one that is not there.
    table[name] = f"={text}" if text == ABSENT or text.startswith("=") else text


def names_path(text: str) -> bool:
    """True for a text that holds an absolute, home or relative path."""
    return bool(_PATH.search(text))


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> tuple[FieldDifference, ...]:
    """Every factor in which two tables differ, in both directions; empty means the same code."""
    return tuple(
        FieldDifference(name, wanted.get(name, NOTHING), found.get(name, NOTHING))
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    )


def kind_of_factor(name: str) -> str:
    """A factor's name for a metric: variables and arguments are counted together."""
    first = name.partition(".")[0]
    return {"env": "environment", "argument": "arguments"}.get(first, name)


def problems_text(key: CompileKey) -> str:
    """The problems of a key in one line, for a trace."""
    return ", ".join(f"{name}: {why}" for name, why in key.problems.items())
