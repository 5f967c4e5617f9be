"""`readyplane route`: which pair a request would get now, and why; nothing is reserved."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField, NotFound, Unavailable
from readyplane_lab.cli import output
from readyplane_lab.cli.faults import note
from readyplane_lab.cli.flags import Json, examples
from readyplane_lab.cli.models import check_known
from readyplane_lab.cli.where import RouterAddress, Where, find, router_of, run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from readyplane.core.work import RequestShape
    from readyplane.core.worker import Fleet
    from readyplane.ports import End, Pair

EXAMPLES = examples(
    "readyplane route --tokens 1200",
    "readyplane route --prompt 'What makes a worker ready?' --max-tokens 200",
    "readyplane route --prompt-file chat.txt --model demo --json",
)
TOKENS_MAX = 2_000_000
PROMPT_BYTES_MAX = 32 * 1024 * 1024
NONE_IS_USUAL = {"stall_s", "crowding_s"}
TERMS = (
    ("queue_s", "wait for P"),
    ("prefill_s", "prefill"),
    ("transfer_s", "KV hand-over"),
    ("first_iteration_s", "first iteration"),
    ("ttft_s", "TTFT"),
    ("tpot_s", "TPOT"),
    ("decode_s", "decode"),
    ("slowdown_s", "slow-down"),
    ("stall_s", "stall"),
    ("crowding_s", "others wait"),
    ("cost_s", "cost"),
)


def route(
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Prompt length; no prefix is looked for."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the prompt; - reads stdin.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Bound of the answer.")
    ] = None,
    model: Annotated[str, typer.Option(metavar="M", help="By default the only one.")] = "",
    json: Json = False,
    router: RouterAddress = "",
) -> None:
    """Ask which pair a request would get now: cost terms, predictions, alternatives, exclusions.

    A prompt is tokenised by an engine of the model, so that cached prefixes count.
    It is a dry run: nothing is reserved, and no request is sent.
    """
    given = [
        n
        for n, v in (("--tokens", tokens), ("--prompt", prompt), ("--prompt-file", prompt_file))
        if v is not None
    ]
    if len(given) != 1:
        shown = " ".join(given) or "nothing"
        raise InvalidField("prompt", shown, "give one of --tokens, --prompt and --prompt-file")
    if tokens is not None and not 1 <= tokens <= TOKENS_MAX:
        raise InvalidField("--tokens", tokens, f"give 1 to {TOKENS_MAX}")
    if max_tokens is not None and not 1 <= max_tokens <= TOKENS_MAX:
        raise InvalidField("--max-tokens", max_tokens, f"give 1 to {TOKENS_MAX}")
    text = _read(prompt_file) if prompt_file is not None else prompt
    if text is not None and not text:
        raise InvalidField(given[0], "", "give a prompt of at least one character")
    where = find("router", router=router)
    pair, shape = run(_ask(where, model, tokens, text, max_tokens))
    if json:
        output.emit(pair_document(pair, shape))
        return
    show_pair(output.console(), pair, shape)
    if tokens is not None:
        note("cached prefixes are not looked for with --tokens; give the prompt for that")


def _read(path: Path) -> str:
    try:
        raw = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1) if str(path) == "-" else path.read_bytes()
        if len(raw) > PROMPT_BYTES_MAX:
            raise InvalidField("--prompt-file", str(path), f"stay below {PROMPT_BYTES_MAX} bytes")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidField("--prompt-file", str(path), f"give a readable text ({why})") from error


async def _ask(
    where: Where, model: str, tokens: int | None, text: str | None, max_tokens: int | None
) -> tuple[Pair, RequestShape]:
    from readyplane.core.work import RequestShape, pack_tokens

    async with router_of(where) as router:
        fleet = await router.list_workers()
        name = model or only_model(fleet, where.model)
        if text is not None and all(w.offer.model != name for w in fleet.workers.values()):
            await check_known(router, name)
        ids = () if text is None else await tokenise(fleet, name, text)
        shape = RequestShape(
            request_id=f"cli-{secrets.token_hex(6)}",
            model=name,
            isl=tokens if text is None and tokens is not None else len(ids),
            token_ids=pack_tokens(ids) if ids else b"",
            max_tokens=max_tokens,
        )
        return await router.route(shape, explain=True, dry_run=True), shape


def only_model(fleet: Fleet, known: str) -> str:
    """The model that is meant when none is named.

    Raises:
        InvalidField: several are served. NotFound: none is, and none is known.
    """
    models = sorted({w.offer.model for w in fleet.workers.values()})
    if len(models) == 1:
        return models[0]
    if models:
        raise InvalidField("--model", "", f"name one of {', '.join(models)}")
    if known:
        return known
    raise NotFound("model", "", "no worker serves one yet; give --model M")


async def tokenise(fleet: Fleet, model: str, text: str) -> tuple[int, ...]:
    """Token ids of a text, by a ready engine of the model, asked as the gateway asks.

    Raises:
        Unavailable: no engine is ready, or none answers.
    """
    from readyplane_agent.engines.openai import OpenAiEngine

    urls = [
        w.serving.engine_url
        for w in fleet.workers.values()
        if w.offer.model == model and w.serving is not None
    ]
    fault: Unavailable | None = None
    for url in urls[:3]:
        try:
            answer = await OpenAiEngine(url, model=model).post(
                "/tokenize", {"model": model, "prompt": text}, timeout_s=10.0
            )
            return tuple(int(t) for t in answer["tokens"])
        except Unavailable as error:
            fault = error
    if fault is not None:
        raise fault
    raise Unavailable(
        f"no ready worker of model {model!r} can tokenise the prompt", "give --tokens N instead"
    )


def pair_document(pair: Pair, shape: RequestShape) -> dict[str, Any]:
    """`{"model", "isl", "prefill", "decode", "predicted", "explanation"}`."""
    return {
        "model": shape.model,
        "isl": shape.isl,
        "max_tokens": shape.max_tokens,
        "prefill": _end(pair.prefill),
        "decode": _end(pair.decode),
        "local": pair.local,
        "predicted": {"ttft_s": pair.predicted_ttft_s, "tpot_s": pair.predicted_tpot_s},
        "explanation": dict(pair.explanation or {}),
    }


def _end(end: End) -> dict[str, Any]:
    return {name: getattr(end, name) for name in end.__slots__}


def show_pair(screen: Console, pair: Pair, shape: RequestShape) -> None:
    """The pair for a person."""
    told: Mapping[str, Any] = pair.explanation or {}
    slo = told.get("slo") or {}
    screen.print(
        f"{shape.isl:,} prompt tokens for [bold]{output.cell(shape.model)}[/bold] would go to\n"
        f"  prefill [bold]{output.cell(pair.prefill.worker_id)}[/bold]"
        f" ({pair.prefill.cached_tokens:,} tokens cached there)\n"
        f"  decode  [bold]{output.cell(pair.decode.worker_id)}[/bold]"
        f" ({pair.decode.cached_tokens:,} tokens cached there)"
        + (", the same worker: nothing is handed over" if pair.local else "")
    )
    for name, value_s, digits in (
        ("TTFT", pair.predicted_ttft_s, 3),
        ("TPOT", pair.predicted_tpot_s, 4),
    ):
        target_s = slo.get(f"{name.lower()}_s")
        aim = "" if target_s is None else f", target {target_s:g} s"
        screen.print(f"predicted {name} {value_s:.{digits}f} s{aim}")
    pairs: Sequence[Mapping[str, Any]] = told.get("pairs") or ()
    if pairs:
        count = int(told.get("candidates", len(pairs)))
        screen.print(f"\nthe best {len(pairs)} of {count} pairs, seconds, best first")
        screen.print(_terms(pairs))
    excluded: Mapping[str, str] = told.get("excluded") or {}
    if excluded:
        made = output.table("not considered", "why not", fixed=("not considered",))
        for name, why in excluded.items():
            made.add_row(output.cell(name), output.cell(why))
        screen.print(made)


def _terms(pairs: Sequence[Mapping[str, Any]]) -> Table:
    names = [f"{output.cell(p['prefill'])}\n{output.cell(p['decode'])}" for p in pairs]
    made = output.table("prefill\ndecode", *names, right=names)
    for key, label in (
        ("prefill_cached_tokens", "cached at P, tokens"),
        ("decode_cached_tokens", "cached at D, tokens"),
    ):
        made.add_row(label, *(f"{p[key]:,}" for p in pairs))
    for key, label in TERMS:
        # A router of another release may not tell of a term.
        values = [p["terms"].get(key) for p in pairs]
        if (key in NONE_IS_USUAL and not any(values)) or all(v is None for v in values):
            continue
        bold = "bold" if key in {"ttft_s", "tpot_s", "cost_s"} else ""
        made.add_row(label, *("-" if v is None else f"{v:.4f}" for v in values), style=bold)
    return made
