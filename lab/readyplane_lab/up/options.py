"""What `readyplane up` was asked to do, checked before anything is started."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import InvalidField
from readyplane.core.identity import parse
from readyplane_lab.demo import demo_bytes

ENGINES = ("modelled", "vllm")


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Arguments of `readyplane up`.

    Attributes:
        quick: the self-check of about a minute. load: drive traffic.
        trace: a trace file, None for the built-in conversation workload.
        speed: compresses time. duration_s: traffic ends then; None for until Ctrl-C or the end of
            the trace. rate_rps: mean of the built-in workload. seed: of every draw.
        data_dir: keeps data; None for a temporary folder. database_url, redis_url: given stores.
        page_port, gateway_port: 0 for a free one. model_bytes: size of the demo model. workers_max: places for workers.
        policy_file: YAML or JSON over the demo's policy. report_file: summary as JSON.
        otlp_endpoint: where traces go; empty is off. log_level: of the services.
        engine: `modelled` or `vllm`. model_dir: the folder that vLLM serves. vllm_bin: its program, None
            for the one of `make vllm-env`. engine_args: of the engines' command lines.
        routers: side by side, all active. router_policy: document of theirs, None for the default.
    """

    quick: bool = False
    load: bool = True
    trace: Path | None = None
    speed: float = 1.0
    duration_s: float | None = None
    rate_rps: float = 5.5
    seed: int = 1
    data_dir: Path | None = None
    database_url: str = ""
    redis_url: str = ""
    page_port: int = 0
    gateway_port: int = 0
    model_bytes: int = 300_000_000
    workers_max: int = 12
    policy_file: Path | None = None
    report_file: Path | None = None
    otlp_endpoint: str = ""
    log_level: str = "info"
    plain: bool = False
    engine: str = "modelled"
    model_dir: Path | None = None
    vllm_bin: Path | None = None
    engine_args: tuple[str, ...] = ()
    routers: int = 1
    router_policy: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            InvalidField: names the option, its value and what to give instead.
        """
        for name in ("speed", "rate_rps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidField(f"--{name.removesuffix('_rps')}", value, "give a number above 0")
        lasts_s = self.duration_s
        if lasts_s is not None and not (math.isfinite(lasts_s) and lasts_s > 0):
            raise InvalidField("--duration", lasts_s, "give seconds above 0, or leave it out")
        if self.seed < 0:
            raise InvalidField("--seed", self.seed, "give 0 or more")
        demo_bytes(self.model_bytes / 1e6)
        if not 2 <= self.workers_max <= 64:
            raise InvalidField("--workers-max", self.workers_max, "give 2 to 64")
        for name in ("page_port", "gateway_port"):
            value = getattr(self, name)
            if not 0 <= value <= 65535:
                raise InvalidField(f"--{name.replace('_', '-')}", value, "give 0 to 65535")
        if self.report_file is not None:
            _check_report(self.report_file)
        if self.trace is not None and not self.load:
            raise InvalidField("--trace", str(self.trace), "leave out --no-load to replay a trace")
        _check_engine(self)


def _check_engine(options: UpOptions) -> None:
    if options.engine not in ENGINES:
        raise InvalidField("--engine", options.engine, "write one of " + ", ".join(ENGINES))
    given = {
        "--model": options.model_dir,
        "--vllm-bin": options.vllm_bin,
        "--engine-arg": " ".join(options.engine_args) if options.engine_args else None,
    }
    if options.engine == "modelled":
        for name, value in given.items():
            if value is not None:
                raise InvalidField(name, str(value), "give it with --engine vllm, only then")
        return
    if options.model_dir is None:
        raise InvalidField("--model", "", "give the folder of a model, with --engine vllm")
    if not (options.model_dir / "config.json").is_file():
        raise InvalidField("--model", str(options.model_dir), "give a folder with a config.json")
    for name, wanted in (("--quick", options.quick), ("--trace", options.trace is not None)):
        if wanted:
            remedy = "leave it out with --engine vllm: it is made for modelled engines"
            raise InvalidField(name, True, remedy)


def _check_report(path: Path) -> None:
    """A report that cannot be written is said before the run, not after it."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidField("--report", str(path), "give a file in an existing, writable folder")


def read_policy(path: Path) -> dict[str, object]:
    """A policy file: YAML, or strict JSON when it ends in `.json`.

    Raises:
        InvalidField: not readable, not an object.
    """
    from readyplane_planner.yaml_text import read_yaml

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("--policy", str(path), f"give a readable YAML file ({error})") from error
    if path.suffix == ".json":
        found = parse(text, where=str(path))
    else:
        found = read_yaml(text, field="--policy", value=str(path))
    if not isinstance(found, dict):
        raise InvalidField("--policy", str(path), "write an object of policy fields")
    return found
