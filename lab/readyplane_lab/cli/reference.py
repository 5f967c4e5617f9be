"""docs/cli.md, made from the command tree, so that it never says anything else than `--help`.

`python -m readyplane_lab.cli.reference` prints it; a tidy test checks that the file is fresh.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from readyplane_lab.cli.app import EXIT_CODES, app

HEAD = """# The `readyplane` command

This page is made from the command itself by `python -m readyplane_lab.cli.reference > docs/cli.md`.
"""
JSON = """With `--json` a command prints one JSON document on stdout and nothing else there; null means "not known".
Remarks, progress and errors go to stderr, an error as one line that names the field, its value and a remedy.
Colours are left out when stdout is no terminal or `NO_COLOR` is set.
"""
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
MARKUP = re.compile(r"\[/?[a-z]+\]")


def reference() -> str:
    """The whole page as Markdown, one sentence a line."""
    root = typer.main.get_command(app)
    parts = [HEAD, _sentences(root.help or ""), JSON, _codes()]
    parts += [_section(path, command) for path, command in _leaves("readyplane", root)]
    return "\n".join(parts).rstrip() + "\n"


def _codes() -> str:
    found = EXIT_CODES.removeprefix("Exit codes: ").rstrip(".").split(", ")
    rows = [f"| {code.partition(' ')[0]} | {code.partition(' ')[2]} |" for code in found]
    return "\n".join(["| exit code | meaning |", "|---|---|", *rows]) + "\n"


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    for name, below in command.commands.items():
        if hasattr(below, "commands"):
            if any(p.name != "help" for p in below.params):  # it does something by itself, too
                yield f"{path} {name}", below
            yield from _leaves(f"{path} {name}", below)
        else:
            yield f"{path} {name}", below


def _section(path: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    needed = [f"{o.opts[0]} {o.metavar}" for o in options if o.required]
    shown = [str(a.metavar) if a.required else f"[{a.metavar}]" for a in arguments]
    usage = " ".join([path, *shown, *needed, "[OPTIONS]"])
    lines = [f"## {path}", "", _sentences(command.help or ""), "```", usage, "```", ""]
    rows = [(str(a.metavar), a) for a in arguments]
    rows += [(" ".join([", ".join(o.opts), o.metavar or ""]).strip(), o) for o in options]
    if rows:
        lines += ["| | |", "|---|---|"]
        lines += [f"| `{_cell(name)}` | {_cell(_meaning(param))} |" for name, param in rows]
        lines.append("")
    given = [line[2:] for line in (command.epilog or "").splitlines() if line.startswith("$ ")]
    if given:
        lines += ["```", *given, "```", ""]
    return "\n".join(lines)


def _meaning(param: Any) -> str:
    text = MARKUP.sub("", param.help or "").strip()
    default = param.default
    told = default not in (None, False, "", []) and not param.required and "default" not in text
    if told:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        text += f" Default: {shown}."
    if param.envvar:
        text += f" [{param.envvar}]"
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sentences(text: str) -> str:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join("\n".join(SENTENCE_END.split(part)) for part in paragraphs) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
