"""`readyplane artifact canary`: record the known answer of a model, for `publish --canary FILE`.

Owns the file's form; which question is asked is `up.golden`'s choice. Nobody is admitted to serve an
artifact without a known answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField
from readyplane_lab.cli import output
from readyplane_lab.cli.flags import Json, examples
from readyplane_lab.cli.where import run

if TYPE_CHECKING:
    from readyplane_lab.up.golden import Golden
    from readyplane_registry.ingest import Facts

CANARY_EXAMPLES = examples(
    "readyplane artifact canary --engine-url http://127.0.0.1:8000 --model llama-8b --out canary.json",
    "readyplane artifact publish ./llama-8b --model llama-8b --canary canary.json",
)
TOKENS_MAX = 4096
FILE_BYTES_MAX = 1 << 20
REMEDY = "record one with `readyplane artifact canary`"


def canary(
    engine_url: Annotated[
        str, typer.Option(metavar="URL", help="An engine that serves these weights now.")
    ],
    model: Annotated[str, typer.Option(metavar="M", help="Name that the engine serves it by.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the answer is to be.")] = Path(
        "canary.json"
    ),
    token: Annotated[
        str,
        typer.Option(
            envvar="READYPLANE_ENGINE_TOKEN",
            metavar="T",
            help="Bearer token of the engine.",
            show_default=False,
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Ask a running engine for the known answer by which every worker of an artifact is proved.

    Several questions are asked greedily; the clearest answer is kept. The engine has to take and give
    token ids, as vLLM does (`/tokenize`, `/v1/completions`).
    """
    from urllib.parse import urlsplit

    parts = urlsplit(engine_url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidField("--engine-url", engine_url, "write http://HOST:PORT of the engine")
    if not out.parent.is_dir():
        raise InvalidField("--out", str(out), "name a file in a folder that exists")
    found = run(_asked(engine_url, model, token))
    document = {
        "prompt_token_ids": list(found.canary.prompt_token_ids),
        "golden_token_ids": list(found.canary.golden_token_ids),
        "ends": found.ends,
        "margin": found.margin,
    }
    out.write_text(_text(document))
    if json:
        output.emit({**document, "file": str(out)})
        return
    output.say(
        f"{out}: {len(found.canary.golden_token_ids)} tokens of answer, each ahead of the next likely "
        f"by {found.margin:.2f} or more"
    )
    output.say(f"publish with it: `readyplane artifact publish DIR --model M --canary {out}`")


async def _asked(url: str, model: str, token: str) -> Golden:
    from readyplane_agent.engines.openai import OpenAiEngine
    from readyplane_lab.up.golden import ask_golden

    return await ask_golden(OpenAiEngine(url, model=model, token=token))


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def with_canary(facts: Facts, path: Path) -> Facts:
    """The facts with the known answer of a file.

    Raises:
        InvalidField: the file, or the field of it that is wrong.
    """
    from dataclasses import replace

    from readyplane.core.identity import Canary

    document = _read(path)
    known = {"prompt_token_ids", "golden_token_ids", "ends", "margin"}
    strange = sorted(document.keys() - known)
    if strange:
        raise InvalidField(f"--canary {path}: {strange[0]}", document[strange[0]], "leave it out")
    ends = document.get("ends", False)
    if not isinstance(ends, bool):
        raise InvalidField(f"--canary {path}: ends", ends, "write true or false")
    found = Canary(
        _ids(document, "prompt_token_ids", path), _ids(document, "golden_token_ids", path)
    )
    config = {**facts.config, "canary_ends": True} if ends else facts.config
    return replace(facts, canary=found, config=config)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InvalidField("--canary", str(path), f"give at most {FILE_BYTES_MAX} bytes")
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidField("--canary", str(path), f"{REMEDY} ({error})") from error
    if not isinstance(document, dict):
        raise InvalidField("--canary", str(path), f"an object is wanted: {REMEDY}")
    return document


def _ids(document: dict[str, Any], name: str, path: Path) -> tuple[int, ...]:
    found = document.get(name)
    whole = isinstance(found, list) and all(type(t) is int and t >= 0 for t in found)
    if not whole or not 1 <= len(found or ()) <= TOKENS_MAX:
        remedy = f"write a list of 1 to {TOKENS_MAX} token ids: {REMEDY}"
        raise InvalidField(f"--canary {path}: {name}", found, remedy)
    return tuple(found or ())
