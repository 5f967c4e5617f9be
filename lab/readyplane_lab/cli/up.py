"""`readyplane up`: flags become options of `readyplane_lab.up`, which does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from readyplane.core.errors import InvalidField
from readyplane_lab.cli.flags import examples, switch
from readyplane_lab.demo import demo_bytes

EXAMPLES = examples(
    "readyplane up",
    "readyplane up --quick",
    "readyplane up --trace azure2023_conv.csv.zst --speed 4",
    "readyplane up --no-load --data-dir ~/readyplane --page-port 8080",
    "readyplane up --database-url postgresql+asyncpg://user:secret@db/readyplane"
    " --redis-url redis://cache:6379/0",
    "readyplane up --engine vllm --model ./tiny-llama --data-dir ~/readyplane-vllm",
)
TRAFFIC, STORES, FLEET, REPORT = "Traffic", "Data and stores", "Fleet", "What it tells"
RATES_RPS = {"modelled": 5.5, "vllm": 0.5}
LEVELS = ("debug", "info", "warning", "error")


def up(
    quick: Annotated[
        bool, switch("--quick", text="Self-check of about a minute; exits 1 if it fails.")
    ] = False,
    no_load: Annotated[
        bool,
        switch("--no-load", text="Only the system, no traffic.", panel=TRAFFIC),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Drive a real trace: Azure CSV or Mooncake JSONL, plain or .zst.",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(metavar="X", help="Compress time X-fold.", rich_help_panel=TRAFFIC)
    ] = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="End the traffic after so many seconds (default: end of the trace, or Ctrl-C).",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Mean requests/s of the built-in conversation workload (default: "
            + ", ".join(f"{rate:g} {name}" for name, rate in RATES_RPS.items())
            + ").",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of every random draw.", rich_help_panel=TRAFFIC)
    ] = 1,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep data there (default: a temporary folder).",
            rich_help_panel=STORES,
        ),
    ] = None,
    database_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Use this PostgreSQL (default: an own one).",
            rich_help_panel=STORES,
            show_default=False,
        ),
    ] = "",
    redis_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Use this Redis or Valkey (default: an own one).",
            rich_help_panel=STORES,
            show_default=False,
        ),
    ] = "",
    page_port: Annotated[
        int,
        typer.Option(metavar="PORT", help="Of the page, 0: any free.", rich_help_panel=REPORT),
    ] = 0,
    gateway_port: Annotated[
        int,
        typer.Option(metavar="PORT", help="Of the OpenAI API, 0: any.", rich_help_panel=REPORT),
    ] = 0,
    engine: Annotated[
        str,
        typer.Option(
            metavar="E",
            help="What workers run: modelled, or a real vllm (docs/vllm.md).",
            rich_help_panel=FLEET,
        ),
    ] = "modelled",
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The folder that a real vLLM serves.", rich_help_panel=FLEET
        ),
    ] = None,
    vllm_bin: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The vllm program (default: the one of `make vllm-env`).",
            rich_help_panel=FLEET,
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARG",
            help="One argument for the command line of every vLLM; repeatable.",
            rich_help_panel=FLEET,
        ),
    ] = None,
    model_mb: Annotated[
        float,
        typer.Option(
            metavar="MB",
            help="Size of the demo model's weights, to 0.07 MB.",
            rich_help_panel=FLEET,
        ),
    ] = 300,
    workers_max: Annotated[
        int,
        typer.Option(metavar="N", help="Places for workers (GPUs).", rich_help_panel=FLEET),
    ] = 12,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML or JSON over the demo's policy.", rich_help_panel=FLEET
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the summary as JSON.", rich_help_panel=REPORT),
    ] = None,
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send traces there (OTLP over gRPC).",
            rich_help_panel=REPORT,
            show_default=False,
        ),
    ] = "",
    log_level: Annotated[
        str,
        typer.Option(
            metavar="LEVEL",
            help="Of the services: " + ", ".join(LEVELS) + ".",
            rich_help_panel=REPORT,
        ),
    ] = "info",
    plain: Annotated[
        bool,
        switch("--plain", text="Lines instead of a live terminal.", panel=REPORT),
    ] = False,
) -> None:
    """Run the whole system on this machine: stores, services, workers, traffic and a page.

    It ends with the traffic or with Ctrl-C, and leaves nothing running.
    """
    if rate is not None and trace is not None:
        raise InvalidField("--rate", rate, "leave it out: a trace has its own arrivals (--speed)")
    if log_level.lower() not in LEVELS:
        raise InvalidField("--log-level", log_level, "write one of " + ", ".join(LEVELS))
    if policy is not None and engine == "modelled":
        from readyplane_lab.up.demo_policy import demo_policy

        demo_policy(policy, quick=quick)  # refused here, before a store or service is started
    from readyplane_lab.up.options import UpOptions
    from readyplane_lab.up.run import main

    options = UpOptions(
        quick=quick,
        load=not no_load,
        trace=trace,
        speed=speed,
        duration_s=duration,
        rate_rps=RATES_RPS.get(engine, 1.0) if rate is None else rate,
        seed=seed,
        data_dir=data_dir,
        database_url=database_url,
        redis_url=redis_url,
        page_port=page_port,
        gateway_port=gateway_port,
        model_bytes=demo_bytes(model_mb),
        engine=engine,
        model_dir=model,
        vllm_bin=vllm_bin,
        engine_args=tuple(engine_arg or ()),
        workers_max=workers_max,
        policy_file=policy,
        report_file=report,
        otlp_endpoint=otlp_endpoint,
        log_level=log_level.lower(),
        plain=plain,
    )
    raise typer.Exit(main(options))
