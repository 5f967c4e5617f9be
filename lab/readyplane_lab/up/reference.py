"""What only a running engine knows of a model: its known answer, and how fast this machine is.

Owns one vLLM that reads the folder by itself, before the model is published: the answer that is
recorded comes from vLLM's own loader, so that a worker whose weights came another way is compared
with it. The class profile is measured on the same engine. Both are kept beside the data, by what they
depend on; the engine is ended again before a worker is ordered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from readyplane.core.errors import InvalidField, Unavailable, Unsupported
from readyplane.core.identity import Canary, digest_of
from readyplane.core.profile import ClassProfile
from readyplane.kit.clock import Clock
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_lab.profiling.fitting import Naming, profile_of
from readyplane_lab.profiling.live import Asked, Measured, measure
from readyplane_lab.profiling.measure import Wanted
from readyplane_lab.up.golden import ask_golden
from readyplane_lab.up.local_server import free_port
from readyplane_lab.up.processes import ProcessTable
from readyplane_lab.up.real_engine import RealEngine

PROCESS = "reference-engine"
READY_WITHIN_S = 600.0
POLL_S = 0.5
STOP_GRACE_S = 10.0
MEASURE_WITHIN_S = (40.0, 80.0, 160.0)
"""Tried in turn: a machine that other work keeps busy takes longer to have a profile's points."""

CHUNK_TOKENS = 2048
WANTED = Wanted(points=5, steps=3, repeats=1, window=12)
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
SAMPLE = "The planner ordered one more prefill worker, and it was ready after a minute or so. "


@dataclass(frozen=True, slots=True)
class Reference:
    """What was found out.

    Attributes:
        canary, ends: the known answer, and whether it ends by itself.
        profile: measured on this machine. context: longest prompt with its answer, tokens.
        characters_per_token: of plain English.
    """

    canary: Canary
    ends: bool
    profile: ClassProfile
    context: int
    characters_per_token: float

    def document(self) -> dict[str, Any]:
        """As it is kept."""
        return {**asdict(self), "profile": self.profile.document()}

    @classmethod
    def from_document(cls, doc: dict[str, Any]) -> Reference:
        """As it was kept. Raises KeyError, TypeError, InvalidField for anything else."""
        canary = {name: tuple(tokens) for name, tokens in doc["canary"].items()}
        return cls(
            Canary(**canary),
            bool(doc["ends"]),
            ClassProfile.from_document(doc["profile"]),
            int(doc["context"]),
            float(doc["characters_per_token"]),
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """Which model, by which engine.

    Attributes:
        digest: of the files. args: of the engine's command line. sequences_max: at once.
    """

    name: str
    folder: Path
    digest: str
    engine: RealEngine
    args: tuple[str, ...]
    sequences_max: int

    @property
    def key(self) -> str:
        """What an answer and a profile depend on."""
        return digest_of(
            [self.digest, self.name, self.engine.version, list(self.args), self.sequences_max]
        )


async def reference(
    subject: Subject,
    *,
    keep: Path,
    table: ProcessTable,
    log_path: Path,
    environment: dict[str, str],
    clock: Clock,
    say: Callable[[str], None],
) -> Reference:
    """What was kept of an earlier run, else what an engine says that is started for it.

    Raises:
        Unavailable: the engine did not come up; the end of its log is shown.
        InvalidField, Refused: it cannot be asked what is needed.
    """
    path = keep / f"{subject.key.removeprefix('sha256:')[:32]}.json"
    try:
        return Reference.from_document(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, InvalidField):
        say(f"vLLM {subject.engine.version} reads {subject.folder}: known answer and class profile")
    port = free_port()
    await table.spawn(PROCESS, command(subject, port), environment, log_path)
    try:
        client = OpenAiEngine(f"http://127.0.0.1:{port}", model=subject.name)
        await _until_up(client, table, clock)
        found = await _ask(client, subject, clock, say)
    finally:
        await table.stop(PROCESS, grace_s=STOP_GRACE_S)
    keep.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found.document(), indent=1))
    return found


def command(subject: Subject, port: int) -> list[str]:
    """The command line of the reference engine: eager, since what it says does not depend on it."""
    return [
        *(str(subject.engine.program), "serve", str(subject.folder)),
        *("--served-model-name", subject.name),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *subject.args,
    ]


async def _until_up(client: OpenAiEngine, table: ProcessTable, clock: Clock) -> None:
    until_s = clock.monotonic_s() + READY_WITHIN_S
    while True:
        try:
            await client.get("/health", timeout_s=5.0)
            return
        except (Unavailable, Unsupported, InvalidField):
            ended = table.returncode(PROCESS)
            if ended is not None or clock.monotonic_s() > until_s:
                how = "is not up" if ended is None else f"ended with status {ended}"
                raise Unavailable(
                    f"vLLM {how}; its log ends: {table.log_tail(PROCESS, 8)}",
                    "check that `vllm serve` can serve the folder",
                ) from None
        await clock.sleep(POLL_S)


async def _ask(
    client: OpenAiEngine, subject: Subject, clock: Clock, say: Callable[[str], None]
) -> Reference:
    kv_bytes_per_token(_config(subject))  # what refuses it is known before minutes are spent
    golden = await ask_golden(client)
    tokens = len(await client.tokenize(SAMPLE * 8))

    async def measured_in(seconds: float) -> Measured:
        asked = Asked(
            client.url,
            model=subject.name,
            sequences_max=subject.sequences_max,
            seconds_max=seconds,
            wanted=WANTED,
        )
        return await measure(asked, clock=clock, random=Random(1), say=lambda _: None)

    measured, profile = await profile_in_time(
        measured_in, lambda found: profile_of(found.readings, _naming(subject, found)), say
    )
    return Reference(
        golden.canary,
        golden.ends,
        profile,
        measured.facts.context_max or 0,
        len(SAMPLE * 8) / max(1, tokens),
    )


async def profile_in_time(
    measured_in: Callable[[float], Awaitable[Measured]],
    fitted: Callable[[Measured], ClassProfile],
    say: Callable[[str], None],
) -> tuple[Measured, ClassProfile]:
    """Readings with their profile; taken anew, in more seconds, while they are too few for one.

    Raises:
        InvalidField: they are too few in the longest of `MEASURE_WITHIN_S`. Whatever measuring raises.
    """
    *tries, last = MEASURE_WITHIN_S
    for seconds in tries:
        measured = await measured_in(seconds)
        try:
            return measured, fitted(measured)
        except InvalidField as error:
            say(f"{seconds:.0f} s were not enough to measure this machine ({error}); again, longer")
    measured = await measured_in(last)
    return measured, fitted(measured)


def _config(subject: Subject) -> dict[str, Any]:
    found = json.loads((subject.folder / "config.json").read_text())
    assert isinstance(found, dict)
    return found


def _naming(subject: Subject, measured: Measured) -> Naming:
    return Naming(
        name=worker_class(subject.engine),
        source=f"measured by `readyplane up` on vLLM {subject.engine.version}, {subject.name}",
        worker_class=worker_class(subject.engine),
        gpus=1,
        price_per_gpu_hour=1.0,
        kv_capacity_tokens=measured.kv_tokens,
        kv_bytes_per_token=kv_bytes_per_token(_config(subject)),
        max_batch_tokens=measured.facts.batch_tokens or CHUNK_TOKENS,
        max_num_seqs=subject.sequences_max,
    )


def worker_class(engine: RealEngine) -> str:
    """The class of this machine's workers."""
    return "vllm-cpu" if engine.on_cpu else "vllm-gpu"


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Bytes of one token's keys and values by a model's config.json.

    Raises:
        InvalidField: it does not tell its layers and heads.
    """
    inner = config.get("text_config")
    told = {**config, **(inner if isinstance(inner, dict) else {})}
    heads = told.get("num_attention_heads")
    sizes = {
        "num_hidden_layers": told.get("num_hidden_layers"),
        "num_key_value_heads": told.get("num_key_value_heads") or heads,
        "head_dim": told.get("head_dim")
        or (told.get("hidden_size", 0) // heads if isinstance(heads, int) and heads else None),
    }
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidField(f"config.json: {name}", value, "write a whole number from 1")
    width = WIDTHS.get(str(told.get("dtype") or told.get("torch_dtype")).removeprefix("torch."), 2)
    return 2 * width * _product(tuple(v for v in sizes.values() if v is not None))


def _product(values: Sequence[int]) -> int:
    total = 1
    for value in values:
        total *= value
    return total
