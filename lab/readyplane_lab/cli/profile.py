"""`readyplane profile`: what a class of workers can do, measured, imported, shown.

Owns the flags and what is printed; the work is in `readyplane_lab.profiling`.
"""

from __future__ import annotations

from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField, Refused
from readyplane_lab.cli import output
from readyplane_lab.cli.faults import note
from readyplane_lab.cli.flags import Json, examples, switch

if TYPE_CHECKING:
    from readyplane.core.profile import ClassProfile
    from readyplane_lab.profiling.fitting import Naming
    from readyplane_lab.profiling.readings import Readings

app = typer.Typer()
LIST_EXAMPLES = examples("readyplane profile list")
SHOW_EXAMPLES = examples(
    "readyplane profile show h200-llama8b-fp8 --plot",
    "readyplane profile show ./b300.json --itl-ms 25 --json | jq .decode",
)
MEASURE_EXAMPLES = examples(
    "readyplane profile measure http://127.0.0.1:8000 --worker-class b300"
    " --kv-bytes-per-token 131072 --out b300.json",
    "readyplane profile measure http://10.0.0.7:8000 --worker-class b300"
    " --base h200-llama8b-fp8 --max-seconds 120 --repeats 1 --out b300.json",
)
IMPORT_EXAMPLES = examples(
    "readyplane profile import selected_prefill_interpolation selected_decode_interpolation"
    " --worker-class h200 --kv-bytes-per-token 65536 --out h200.json",
    "readyplane profile import c1/profile_export_aiperf.json c16/profile_export_aiperf.json"
    " --worker-class rtx5090 --kv-tokens 180000 --kv-bytes-per-token 65536 --out rtx5090.json",
)
DEFAULT_EXAMPLES = examples(
    "readyplane profile assume --worker-class b300 --gpus 2 --model-bytes 140e9 --out b300.json"
)
SEQUENCES = 256
SAME = "What cannot be measured (by default as --base has it)"

Class = Annotated[
    str, typer.Option("--worker-class", metavar="CLASS", help="The class it describes.")
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE.json", help="Where it is written.")]
Name = Annotated[str, typer.Option(metavar="NAME", help="Its name (default: CLASS).")]
Force = Annotated[bool, switch("--force", text="Write it though something speaks against it.")]
Base = Annotated[
    str,
    typer.Option(
        metavar="PROFILE", help="A profile, name or file, of the same model.", rich_help_panel=SAME
    ),
]
Gpus = Annotated[
    int, typer.Option(metavar="N", help="GPUs of one worker; 0: one.", rich_help_panel=SAME)
]
Price = Annotated[
    float,
    typer.Option(metavar="X", help="Cost of a GPU-hour; 0: 1.", rich_help_panel=SAME),
]
KvTokens = Annotated[
    int,
    typer.Option(metavar="N", help="KV tokens that one worker holds; 0: as found."),
]
KvBytes = Annotated[
    int,
    typer.Option(metavar="N", help="Bytes of one token's KV.", rich_help_panel=SAME),
]
Sequences = Annotated[
    int,
    typer.Option("--max-num-seqs", metavar="N", help="Sequences at once; 0: as told, else 256."),
]


@app.command("list", epilog=LIST_EXAMPLES)
def list_(json: Json = False) -> None:
    """List the profiles that ship with the product."""
    from readyplane import profiles

    found = [profiles.load(name) for name in profiles.names()]
    if json:
        output.emit({"profiles": [_row(p) for p in found]})
        return
    made = output.table("profile", "class", "GPUs", "KV tokens", "measured", right=("GPUs",))
    for p in found:
        measured = "yes" if p.measured else "no: conservative assumptions"
        made.add_row(
            output.cell(p.name),
            output.cell(p.worker_class),
            str(p.gpus),
            output.number(p.kv_capacity_tokens),
            measured,
        )
    output.console().print(made)


def _row(profile: ClassProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "worker_class": profile.worker_class,
        "gpus": profile.gpus,
        "kv_capacity_tokens": profile.kv_capacity_tokens,
        "measured": profile.measured,
        "source": profile.source,
    }


@app.command("show", epilog=SHOW_EXAMPLES)
def show(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="A name of `profile list`, or a file.")
    ],
    plot: Annotated[bool, switch("--plot", text="Draw both curves as text.")] = False,
    itl_ms: Annotated[
        float, typer.Option(metavar="MS", help="Inter-token latency that decode shall keep.")
    ] = 50.0,
    json: Json = False,
) -> None:
    """Show what one worker can do by a profile, how well it fits, and where it comes from."""
    if not itl_ms > 0:
        raise InvalidField("--itl-ms", itl_ms, "give milliseconds above 0")
    from readyplane import profiles

    _tell(profiles.load(profile), itl_ms=itl_ms, plot=plot, json=json)


def _tell(profile: ClassProfile, *, itl_ms: float, plot: bool, json: bool) -> None:
    from readyplane_lab.profiling.showing import capacities, plots

    facts = capacities(profile, itl_ms=itl_ms)
    if json:
        output.emit(facts)
        return
    screen = output.console()
    screen.print(
        f"[bold]{output.cell(profile.name)}[/bold]: class {output.cell(profile.worker_class)}, "
        f"GPUs a worker {profile.gpus}"
    )
    screen.print(f"source     {profile.source}", markup=False)
    screen.print(
        f"KV         {profile.kv_capacity_tokens:,} tokens of {profile.kv_bytes_per_token:,} bytes"
    )
    screen.print(
        f"limits     {profile.max_num_seqs} sequences, {profile.max_batch_tokens:,} tokens a chunk"
    )
    made = output.table(
        "prefill of", "takes", "tokens/s", right=("prefill of", "takes", "tokens/s")
    )
    for row in facts["prefill"]:
        beyond = " (beyond what was measured)" if row["extrapolated"] else ""
        made.add_row(
            f"{row['isl']:,} tokens",
            output.seconds(row["seconds"], 3) + beyond,
            output.number(row["tokens_per_s"]),
        )
    screen.print(made)
    made = output.table(
        "decode at", f"sequences at {itl_ms:g} ms", "tokens/s", right=("decode at", "tokens/s")
    )
    for row in facts["decode"]:
        made.add_row(
            f"{row['context']:,} tokens",
            output.number(row["sequences"]),
            output.number(row["tokens_per_s"]),
        )
    screen.print(made)
    for row in facts["fit"]:
        screen.print(
            f"{row['stage']:<10} {100 * row['error']:.1f} % off in the median, {100 * row['worst']:.0f} "
            f"% at worst, of {row['held_out']} points that were held out ({row['points']} in all)"
        )
    for doubt in facts["doubts"]:
        screen.print(f"[yellow]doubt[/yellow]      {output.cell(doubt)}")
    if plot:
        print()
        print("\n".join(plots(profile)))


@app.command("measure", epilog=MEASURE_EXAMPLES)
def measure(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Base URL of the endpoint, http://HOST:PORT.")
    ],
    worker_class: Class,
    out: Out,
    model: Annotated[
        str, typer.Option(metavar="M", help="Which of its models (default: the only one).")
    ] = "",
    name: Name = "",
    max_seconds: Annotated[
        float, typer.Option(metavar="S", help="Longest that it may take.")
    ] = 600.0,
    max_requests: Annotated[
        int, typer.Option(metavar="N", help="Most requests that it may send.")
    ] = 5000,
    isl_max: Annotated[
        int, typer.Option(metavar="N", help="Longest prompt in tokens; 0: as the endpoint takes.")
    ] = 0,
    points: Annotated[int, typer.Option(metavar="N", help="Prompt lengths.")] = 9,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Numbers of sequences at each of three contexts.")
    ] = 4,
    repeats: Annotated[int, typer.Option(metavar="N", help="Times each is measured.")] = 3,
    window: Annotated[
        int, typer.Option(metavar="N", help="Tokens of each sequence in a mean iteration.")
    ] = 32,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of the prompts; 0: new ones, which no cache holds.")
    ] = 0,
    kv_tokens: KvTokens = 0,
    max_num_seqs: Sequences = 0,
    base: Base = "",
    kv_bytes_per_token: KvBytes = 0,
    gpus: Gpus = 0,
    price: Price = 0.0,
    engine_token: Annotated[
        str,
        typer.Option(
            envvar="READYPLANE_ENGINE_TOKEN",
            metavar="T",
            help="API key of the endpoint.",
            show_default=False,
        ),
    ] = "",
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure a live OpenAI-style endpoint (vLLM, SGLang) and write its class profile.

    It must be idle: prompts go one at a time, then batches that all decode at once.
    Prompts are random tokens, so that no cache answers them; one is repeated, to see the cache.
    Each figure is the median of its repeats, the first requests are thrown away.
    The profile says how well it predicts points that were held out of it.
    One that predicts badly, or rests on too little, is not written without --force.
    """
    for flag, value, low in (
        ("--points", points, 2),
        ("--steps", steps, 2),
        ("--repeats", repeats, 1),
        ("--window", window, 4),
        ("--max-requests", max_requests, 1),
        ("--max-seconds", max_seconds, 1),
    ):
        if not low <= value < inf:
            raise InvalidField(flag, value, f"give at least {low}")
    if not url.startswith(("http://", "https://")):
        raise InvalidField("URL", url, "write http://HOST:PORT of the endpoint")
    given = _Given(worker_class, name, base, gpus, price, kv_bytes_per_token, max_num_seqs)
    given.check(out)
    import secrets
    from random import Random

    from readyplane.kit.clock import SystemClock, utc
    from readyplane_lab.cli.where import run
    from readyplane_lab.profiling import live
    from readyplane_lab.profiling.measure import Wanted

    clock = SystemClock()
    asked = live.Asked(
        url=url,
        model=model,
        token=engine_token,
        isl_max=isl_max,
        kv_tokens=kv_tokens,
        sequences_max=max_num_seqs,
        seconds_max=max_seconds,
        requests_max=max_requests,
        wanted=Wanted(points=points, steps=steps, repeats=repeats, window=window),
    )
    random = Random(seed or secrets.randbits(64))
    found = run(live.measure(asked, clock=clock, random=random, say=note))
    engine = f", {found.facts.engine}" if found.facts.engine else ""
    source = (
        f"measured {utc(clock.wall_s()):%Y-%m-%d} on {url}: {found.facts.model}{engine}, "
        f"{found.requests} requests in {found.seconds:.0f} s, medians of {repeats}"
    )
    naming = given.naming(
        source,
        found.kv_tokens,
        found_gpus=None,
        sequences=found.sequences_max,
        batch=found.facts.batch_tokens,
    )
    _write(found.readings, naming, out, force=force, json=json)


@app.command("import", epilog=IMPORT_EXAMPLES)
def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="Dynamo's .npz (or its folder), AIPerf's or GuideLLM's .csv or .json.",
        ),
    ],
    worker_class: Class,
    out: Out,
    name: Name = "",
    concurrency: Annotated[
        float,
        typer.Option(metavar="N", help="Requests at once of AIPerf runs that do not say."),
    ] = 0.0,
    kv_tokens: KvTokens = 0,
    max_num_seqs: Sequences = 0,
    base: Base = "",
    kv_bytes_per_token: KvBytes = 0,
    gpus: Gpus = 0,
    price: Price = 0.0,
    force: Force = False,
    json: Json = False,
) -> None:
    """Make a class profile of what other tools have measured.

    Several files make one profile: a stage each (Dynamo), or a run each (AIPerf).
    Runs with one request at a time tell of prefill, runs of any concurrency tell of decode.
    Units are read from the files and never guessed.
    """
    if concurrency < 0:
        raise InvalidField("--concurrency", concurrency, "give requests above 0")
    given = _Given(worker_class, name, base, gpus, price, kv_bytes_per_token, max_num_seqs)
    given.check(out)
    from readyplane_lab.profiling.importing import read_files

    found = read_files(files, concurrency=concurrency or None)
    held = kv_tokens or found.kv_tokens or given.kv_tokens
    if not held:
        raise InvalidField(
            "--kv-tokens", None, "the files do not tell it; give one worker's tokens"
        )
    source = f"imported from {', '.join(found.tools)}: {', '.join(p.name for p in files)}"
    most = ceil(max((r.sequences for r in found.readings.decode), default=0.0))
    seen = most if most > SEQUENCES and not max_num_seqs else 0
    naming = given.naming(source, held, found_gpus=found.gpus, sequences=seen)
    _write(found.readings, naming, out, force=force, json=json)


@app.command("assume", epilog=DEFAULT_EXAMPLES)
def assume(
    worker_class: Class,
    out: Out,
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs of one worker.")] = 1,
    model_bytes: Annotated[
        float, typer.Option(metavar="N", help="Bytes of the weights; 0: 16e9.")
    ] = 0.0,
    kv_tokens: Annotated[
        int, typer.Option(metavar="N", help="KV tokens that one worker holds; 0: few.")
    ] = 0,
    kv_bytes_per_token: Annotated[
        int, typer.Option(metavar="N", help="Bytes of one token's KV; 0: 327680.")
    ] = 0,
) -> None:
    """Write conservative assumptions about a class that cannot be measured yet.

    The planner only advises with them, until it has learned enough from running workers.
    """
    _check_out(out)
    for flag, value in (("--gpus", gpus - 1), ("--model-bytes", model_bytes)):
        if value < 0:
            raise InvalidField(flag, value, "give a number above 0")
    from readyplane.core.profile_default import conservative

    profile = conservative(
        worker_class,
        gpus=gpus,
        model_bytes=model_bytes or None,
        kv_tokens=kv_tokens or None,
        kv_bytes_per_token=kv_bytes_per_token or None,
    )
    _save(profile, out)
    _tell(profile, itl_ms=50.0, plot=False, json=False)


class _Given:
    """What a person says of a class; what is not said is as `base` has it."""

    def __init__(
        self,
        worker_class: str,
        name: str,
        base: str,
        gpus: int,
        price: float,
        kv_bytes: int,
        sequences: int,
    ) -> None:
        for flag, value in (
            ("--gpus", gpus),
            ("--price", price),
            ("--kv-bytes-per-token", kv_bytes),
            ("--max-num-seqs", sequences),
        ):
            if value < 0:
                raise InvalidField(flag, value, "give a number above 0")
        if not worker_class:
            raise InvalidField("--worker-class", worker_class, "name the class it describes")
        from readyplane import profiles

        self._base = profiles.load(base) if base else None
        self._class, self._name = worker_class, name or worker_class
        self._gpus, self._price, self._sequences = gpus, price, sequences
        self._kv_bytes = kv_bytes or (self._base.kv_bytes_per_token if self._base else 0)

    @property
    def kv_tokens(self) -> int:
        """Of the base, 0 without one."""
        return self._base.kv_capacity_tokens if self._base else 0

    def check(self, out: Path) -> None:
        """Before anything takes time. Raises InvalidField."""
        _check_out(out)
        if not self._kv_bytes:
            raise InvalidField(
                "--kv-bytes-per-token",
                None,
                "nobody can measure it: give 2 x layers x KV heads x head size x bytes of a number "
                "(131072 for Llama 3.1 8B in bf16), or --base PROFILE of the same model",
            )

    def naming(
        self,
        source: str,
        kv_tokens: int,
        *,
        found_gpus: int | None,
        sequences: int,
        batch: int | None = None,
    ) -> Naming:
        """All that a profile needs beside its points."""
        from readyplane_lab.profiling.fitting import Naming

        base = self._base
        price = self._price or (base.price_per_gpu_hour if base else 1.0)
        batch = batch or (base.max_batch_tokens if base else 8192)
        most = sequences or self._sequences or (base.max_num_seqs if base else SEQUENCES)
        return Naming(
            name=self._name,
            source=source,
            worker_class=self._class,
            gpus=self._gpus or found_gpus or (base.gpus if base else 1),
            price_per_gpu_hour=price,
            kv_capacity_tokens=kv_tokens,
            kv_bytes_per_token=self._kv_bytes,
            max_batch_tokens=batch,
            max_num_seqs=most,
        )


def _check_out(out: Path) -> None:
    if out.suffix != ".json":
        raise InvalidField("--out", str(out), "end it in .json: a policy knows files by that")
    if not out.absolute().parent.is_dir():
        raise InvalidField("--out", str(out), "give a file in a folder that exists")


def _write(readings: Readings, naming: Naming, out: Path, *, force: bool, json: bool) -> None:
    """Write the profile, unless something speaks against it."""
    from dataclasses import replace

    from readyplane_lab.profiling.fitting import objections, profile_of

    profile = profile_of(readings, naming)
    against = objections(profile)
    if against and not force:
        raise Refused(
            f"the profile of {naming.worker_class}",
            against,
            "nothing was written: measure longer or give more files, or write it with --force",
        )
    told = [*readings.notes, *(f"forced: {text}" for text in against)]
    if told:
        profile = replace(profile, source=f"{profile.source}; {'; '.join(told)}")
    _save(profile, out)
    for text in against:
        note(f"written all the same: {text}")
    _tell(profile, itl_ms=50.0, plot=False, json=json)


def _save(profile: ClassProfile, out: Path) -> None:
    from json import dumps

    from readyplane_lab.proof.whole_file import write_whole

    write_whole(out, dumps(profile.document(), indent=1) + "\n")
    where = out.absolute()
    note(
        f"{where} is written; use it with: readyplane policy set prefill.profile={where} "
        f"prefill.worker_class={profile.worker_class} (and decode, likewise)"
    )
