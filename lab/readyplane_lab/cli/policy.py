"""`readyplane policy`: what is wanted of a model's pools, shown and changed by compare-and-set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField, Unavailable
from readyplane_lab.cli import output
from readyplane_lab.cli.flags import Json, examples, switch
from readyplane_lab.cli.where import PlannerAddress, Where, find, planner_of, run

if TYPE_CHECKING:
    from readyplane.ports import Planner

app = typer.Typer()
SUFFIXES = (".yaml", ".yml", ".json")
SHOW_EXAMPLES = examples("readyplane policy show", "readyplane policy show --json | jq .version")
SET_EXAMPLES = examples(
    "readyplane policy set prefill.max=8",
    "readyplane policy set slo.ttft_s=1.5 down.hold_s=null --expected-version 3",
    "readyplane policy set policy.yaml",
    "readyplane policy set --file policy.yaml --whole",
    "readyplane policy set paused=true",
)

AGAIN_EXAMPLES = examples("readyplane policy again", "readyplane policy again --model llama")


@app.command("show", epilog=SHOW_EXAMPLES)
def show(
    model: Annotated[str, typer.Option(metavar="M", help="Of this model.")] = "",
    json: Json = False,
    planner: PlannerAddress = "",
) -> None:
    """Show the policy in force, every field, as YAML that `policy set --file` takes back."""
    where = find("planner", planner=planner)
    policy, version, warnings = run(_get(where, model))
    if json:
        output.emit({"version": version, "policy": policy, "warnings": warnings})
        return
    from readyplane_planner.yaml_text import write_yaml

    output.say(f"# policy of {policy.get('model', model)}, version {version}")
    for warned in warnings:
        output.say(f"# {_warned(warned)}")
    output.say(write_yaml(policy), end="", lines=True)


async def _get(where: Where, model: str) -> tuple[dict[str, Any], int, list[dict[str, Any]]]:
    async with planner_of(where) as planner:
        return *await planner.get_policy(model), await _warnings(planner, model)


async def _warnings(planner: Planner, model: str) -> list[dict[str, Any]]:
    """What the planner says of the policy in force; nothing before its first look."""
    try:
        return list((await planner.state(model)).get("policy_warnings", ()))
    except Unavailable:
        return []


def _warned(warned: Mapping[str, Any]) -> str:
    return f"{warned['code']}: {warned['text']}"


@app.command("set", epilog=SET_EXAMPLES)
def set_(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|KEY=VALUE…",
            help="A YAML or JSON file, or fields by their dotted names with YAML values.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The same as naming the file."),
    ] = None,
    whole: Annotated[
        bool,
        switch("--whole", text="FILE is the whole policy; what it leaves out is reset."),
    ] = False,
    expected_version: Annotated[
        int,
        typer.Option(metavar="N", help="Only if the policy still has this version; 0: any."),
    ] = 0,
    model: Annotated[str, typer.Option(metavar="M", help="Of this model.")] = "",
    json: Json = False,
    planner: PlannerAddress = "",
) -> None:
    """Change fields of the policy; it is in force from the planner's next tick.

    Everything or nothing: a wrong field or value changes nothing, and the right place is named.
    All fields: docs/policy.md.
    """
    wanted = _wanted(changes or [], file, whole=whole)
    if expected_version < 0:
        raise InvalidField("--expected-version", expected_version, "give a version from 1, or 0")
    where = find("planner", planner=planner)
    before, after, version, warnings = run(
        _put(where, model, wanted, expected_version, merge=not whole)
    )
    moved = {
        key: {"from": before.get(key), "to": after.get(key)}
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    }
    if json:
        output.emit({"version": version, "changed": moved, "warnings": warnings})
        return
    for key, change in moved.items():
        output.say(f"{key}: {_shown(change['from'])} → {_shown(change['to'])}")
    output.say(f"policy version {version}" + ("" if moved else ", nothing differs"))
    for warned in warnings:
        output.say(_warned(warned))


@app.command("again", epilog=AGAIN_EXAMPLES)
def again(
    model: Annotated[str, typer.Option(metavar="M", help="Of this model.")] = "",
    json: Json = False,
    planner: PlannerAddress = "",
) -> None:
    """Order again what was ordered no more, because its starts had ended for good.

    Makes a new version of the policy that changes nothing.
    What fails alike is ordered no more again, after two starts.
    """
    where = find("planner", planner=planner)
    _before, _after, version, warnings = run(_put(where, model, {}, 0, merge=True))
    if json:
        output.emit({"version": version, "changed": {}, "warnings": warnings})
        return
    output.say(f"policy version {version}: every artifact may be ordered again")


def _wanted(changes: Sequence[str], file: Path | None, *, whole: bool) -> dict[str, Any]:
    if file is None and len(changes) == 1 and _is_file(changes[0]):
        file, changes = Path(changes[0]), []
    if bool(changes) == (file is not None):
        shown = " ".join([*changes, *(["--file"] if file else [])]) or "nothing"
        raise InvalidField("KEY=VALUE", shown, "give fields, or a FILE")
    if whole and file is None:
        raise InvalidField("--whole", True, "give it with --file FILE")
    if file is None:
        return parse_changes(changes)
    from readyplane_lab.up.options import read_policy

    try:
        return read_policy(file)
    except InvalidField as error:
        if error.field != "--policy":
            raise
        raise InvalidField("--file", error.value, error.remedy) from error


def _is_file(text: str) -> bool:
    """Whether the one thing that is given is a file: no field can be named so."""
    return "=" not in text and (Path(text).suffix in SUFFIXES or Path(text).is_file())


async def _put(
    where: Where, model: str, wanted: Mapping[str, Any], expected_version: int, *, merge: bool
) -> tuple[dict[str, Any], dict[str, Any], int, list[dict[str, Any]]]:
    async with planner_of(where) as planner:
        before, _version = await planner.get_policy(model)
        after, version = await planner.set_policy(
            wanted, model=model, merge=merge, expected_version=expected_version
        )
        warnings = await _warnings(planner, model)
    return flat(before), flat(after), version, warnings


def parse_changes(changes: Sequence[str]) -> dict[str, Any]:
    """`["prefill.max=8"]` -> `{"prefill": {"max": 8}}`; a leading `policy.` is left out.

    Raises:
        InvalidField: no `=`, an empty part of a name, no YAML, or two values for one place.
    """
    wanted: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        parts = key.strip().removeprefix("policy.").split(".")
        if not equals or not all(parts):
            raise InvalidField("KEY=VALUE", change, "write it like prefill.max=8")
        place = wanted
        for part in parts[:-1]:
            below = place.setdefault(part, {})
            if not isinstance(below, dict):
                raise InvalidField(key, text, f"{part} already has a value of its own")
            place = below
        if parts[-1] in place:
            raise InvalidField(key, text, "give each field once")
        place[parts[-1]] = _value(key, text)
    return wanted


def _value(key: str, text: str) -> Any:
    from readyplane_planner.yaml_text import read_yaml

    value = read_yaml(text, field=key, value=text)
    if value is not None and not isinstance(value, str | bool | int | float | list | dict):
        raise InvalidField(key, text, "write a number, text, true, false, null, list or object")
    return value


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as dotted names."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _shown(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)
