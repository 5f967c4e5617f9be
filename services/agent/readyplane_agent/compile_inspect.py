"""What an engine's generated code will depend on here: seen on this machine, never assumed (R12.1).

Owns the looking: packages of the engine's own Python, the driver and the devices that the engine
will see, this processor, the model's structure, the engine's arguments and variables. What is not
there is told apart from what could not be found out. Hands `CompileFacts` to `core.compile_key`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from readyplane.core.compile_environment import review_arguments, review_environment
from readyplane.core.compile_key import CompileFacts, Seen, absent, known, names_path, unknown
from readyplane.core.identity import Manifest, digest_of
from readyplane_agent.engines.port import EngineSpec

PROBE_LIMIT_S = 10.0
CONTENT_BYTES_MAX = 64 * 2**20
CONTENT_FILES_MAX = 1000
DEFAULT = "engine default"
CXX = "g++"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_SIGNS = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/nvidia0", "/dev/dxg")
OTHER_DEVICES = ("/dev/kfd", "/dev/accel", "/dev/habanalabs")
# What generates, or is linked into, an engine's code; beside the engine and its framework.
LIBRARIES = (
    "flashinfer-python",
    "flashinfer-cubin",
    "flash-attn",
    "flash-attn-3",
    "xformers",
    "sgl-kernel",
    "deep-gemm",
    "nvidia-cutlass-dsl",
    "tilelang",
    "transformers",
    "numba",
)
CUDA = ("nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cuda-nvcc", "nvidia-cudnn")
CUDA_PACKAGES = tuple(
    f"{name}{suffix}" for name in CUDA for suffix in ("", "-cu11", "-cu12", "-cu13")
)
VERSIONS_PROGRAM = """
import importlib.metadata as m, json, platform, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        found[name] = None
print(json.dumps({"versions": found, "python": platform.python_implementation() + " " + platform.python_version()}))
"""

Run = Callable[[Sequence[str], Mapping[str, str]], str]


class ProbeFailed(Exception):
    """A probe gave no answer; the text says why."""


def run(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The output of a short program. Raises ProbeFailed; one that hangs is killed."""
    try:
        done = subprocess.run(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ProbeFailed(f"no answer within {PROBE_LIMIT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise ProbeFailed(
            f"exit status {error.returncode}: {error.stderr.strip()[-100:]}"
        ) from None
    except OSError as error:
        raise ProbeFailed(error.strerror or str(error)) from None
    return done.stdout


class Inspector:
    """One look at this machine on behalf of one engine. Blocking: call it in a thread.

    Args:
        engine: `modelled` or `vllm`. environ: of the agent; the engine inherits it.
        run: runs a probe. exists: whether a device file is there.
    """

    def __init__(
        self,
        engine: str,
        environ: Mapping[str, str],
        *,
        run: Run = run,
        exists: Callable[[str], bool] = os.path.exists,
    ) -> None:
        self._engine, self._environ, self._run, self._exists = engine, environ, run, exists

    def facts(self, spec: EngineSpec, manifest: Manifest) -> CompileFacts:
        """Everything that this engine's code depends on."""
        environ = {**self._environ, **spec.environment}
        arguments = review_arguments(spec.extra_args).counted
        devices = self._devices(environ)
        packages = self._packages(environ)
        if self._engine != "modelled" and devices["device"] == absent():
            packages["compiler"] = self._with_cxx(packages["compiler"], environ)
        factors = {
            **model_factors(manifest),
            **argument_factors(manifest, arguments, environ),
            # Ranks that the agent starts itself stand in no argument.
            **({"tp": known(1 + len(spec.ranks))} if spec.ranks else {}),
            **packages,
            **devices,
            "runtime_config": known(
                f"max_batch_tokens={spec.max_batch_tokens} max_num_seqs={spec.max_num_seqs}"
            ),
            "mode": known(spec.mode),
            "rank": known("0"),
            "host": host(),
        }
        if self._engine == "modelled":
            factors["profile"] = known(Path(spec.profile).name)
        named = [*review_environment(environ).counted.values(), *arguments.values()]
        contents = {text: found for text in named if (found := content_digest(text))}
        return CompileFacts(factors, environ, contents)

    # --------------------------------------------------------------------------- packages

    def _packages(self, environ: Mapping[str, str]) -> dict[str, Seen]:
        own = self._engine == "modelled"
        engine = "readyplane" if own else self._engine
        names = (engine, "torch", "triton", *LIBRARIES, *CUDA_PACKAGES)
        problem, versions, python = "", dict[str, str | None](), python_here()
        try:
            if own:
                versions = {name: version_here(name) for name in names}
            else:
                versions, python = self._versions_of(self._engine, names, environ)
        except ProbeFailed as error:
            problem = f"packages of {self._engine}: {error}"

        def seen(*wanted: str) -> Seen:
            if problem:
                return unknown(problem)
            found = [f"{name}={versions[name]}" for name in wanted if versions.get(name)]
            return known(" ".join(found)) if found else absent()

        version = seen(engine)
        return {
            "engine": known(self._engine),
            # An engine that runs has a version; one that cannot be found is not `absent`.
            "engine_version": unknown(f"{engine} is not installed")
            if version == absent()
            else version,
            "framework": seen("torch"),
            "compiler": seen("triton"),
            "cuda": seen(*CUDA_PACKAGES),
            "libraries": seen(*LIBRARIES),
            "python": unknown(problem) if problem else known(python),
        }

    def _versions_of(
        self, program: str, names: Sequence[str], environ: Mapping[str, str]
    ) -> tuple[dict[str, str | None], str]:
        """Versions as the engine's own interpreter has them, which need not be the agent's."""
        script = program_of(program, environ)
        if script is None:
            raise ProbeFailed(f"{program} is not on PATH")
        python = Path(script).resolve().parent / "python"
        command = [str(python), "-c", VERSIONS_PROGRAM, *names]
        try:
            document = json.loads(self._run(command, environ))
            return dict(document["versions"]), str(document["python"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProbeFailed(f"odd answer ({error})") from None

    def _with_cxx(self, seen: Seen, environ: Mapping[str, str]) -> Seen:
        """Code for a processor is made by the machine's C++ compiler, which no package tells of."""
        if seen.problem:
            return seen
        try:
            told = self._run([environ.get("CXX") or CXX, "--version"], environ)
        except ProbeFailed as error:
            return unknown(f"C++ compiler: {error}")
        lines = told.splitlines()
        before = [] if seen.value is None else [seen.value]
        return known(" ".join([*before, f"cxx={lines[0].strip() if lines else 'unnamed'}"]))

    # ---------------------------------------------------------------------------- devices

    def _devices(self, environ: Mapping[str, str]) -> dict[str, Seen]:
        names = ("device", "capability", "sm_count", "mig", "driver")
        other = next((path for path in OTHER_DEVICES if self._exists(path)), "")
        if other:
            return dict.fromkeys(names, unknown(f"{other}: such devices are not inspected yet"))
        if not any(self._exists(path) for path in DRIVER_SIGNS):
            return dict.fromkeys(names, absent())
        try:
            found = json.loads(
                self._run([sys.executable, "-m", "readyplane_agent.compile_device"], environ)
            )
            if "problem" in found:
                raise ProbeFailed(str(found["problem"]))
            classes = {
                (str(d["name"]), str(d["capability"]), int(d["sm_count"])) for d in found["devices"]
            }
        except (ProbeFailed, ValueError, KeyError, TypeError) as error:
            return dict.fromkeys(names, unknown(f"devices: {error}"))
        if not classes:
            return {**dict.fromkeys(names, absent()), "driver": self._driver(environ)}
        if len(classes) > 1:
            told = ", ".join(sorted(name for name, _, _ in classes))
            return dict.fromkeys(names, unknown(f"several kinds of device are visible: {told}"))
        name, capability, sm_count = classes.pop()
        mig = re.search(r"\bMIG (\S+)", name)
        return {
            "device": known(name),
            "capability": known(capability),
            "sm_count": known(sm_count) if sm_count > 0 else unknown("the driver says 0"),
            "mig": known(mig.group(1)) if mig else absent(),
            "driver": self._driver(environ),
        }

    def _driver(self, environ: Mapping[str, str]) -> Seen:
        try:
            text = DRIVER_FILE.read_text()
        except OSError:
            text = ""
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
        if found:
            return known(found.group(1))
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            lines = set(self._run(command, environ).split())
        except ProbeFailed as error:
            return unknown(f"nvidia-smi: {error}")
        return (
            known(lines.pop()) if len(lines) == 1 else unknown(f"nvidia-smi told {sorted(lines)}")
        )


def model_factors(manifest: Manifest) -> dict[str, Seen]:
    """Structure and code of the model: shapes, never values; names of files, never places."""
    config = {k: v for k, v in manifest.config.items() if k not in {"name", "comment"}}
    shapes = [[t.name, t.dtype, list(t.shape)] for t in manifest.tensors]
    files = {f.path: f.sha256 for f in manifest.files}
    configs = {path: sha for path, sha in files.items() if path.rpartition("/")[2] == "config.json"}
    code = {path: sha for path, sha in files.items() if path.endswith(".py")}
    structure = {"config": config, "tensors": shapes, "files": configs, "layout": manifest.layout}
    return {
        "model_structure": known(digest_of(structure)),
        "model_code": known(digest_of(code)) if code else absent(),
    }


def argument_factors(
    manifest: Manifest, arguments: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, Seen]:
    """The declared factors that arguments decide, and every argument that counts under its name."""

    def given(*flags: str, other: object = DEFAULT) -> Seen:
        found = [arguments[flag] for flag in flags if flag in arguments]
        return known(" ".join(found) if found else other)

    quantised = given("--quantization", "-q", other=manifest.quantisation)
    shapes = (
        "--cuda-graph-sizes",
        "--cudagraph-capture-sizes",
        "--compilation-config",
        "-O",
        "-cc",
    )
    speculative = ("--speculative-config", "--speculative-num-steps", "--num-speculative-tokens")
    backend = environ.get("VLLM_ATTENTION_BACKEND", DEFAULT)
    return {
        **{f"argument.{flag}": known(value) for flag, value in arguments.items()},
        "dtype": given("--dtype"),
        "kv_dtype": given("--kv-cache-dtype", other=manifest.config.get("kv_dtype", DEFAULT)),
        "quantisation": quantised,
        "attention_backend": given("--attention-backend", other=backend),
        "tp": given("--tensor-parallel-size", "-tp", other=manifest.tp),
        "pp": given("--pipeline-parallel-size", "-pp", other=manifest.pp),
        "ep": given("--enable-expert-parallel", "--expert-parallel-size", other=manifest.ep),
        "dp": given("--data-parallel-size", "-dp", other=1),
        "captured_shapes": given(*shapes),
        "speculative": given(*speculative, other="none"),
    }


def host() -> Seen:
    """Machine, C library and instruction set: code for the processor depends on them as well."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        return unknown(f"/proc/cpuinfo: {error.strerror}")
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    if not flags:
        return unknown("/proc/cpuinfo names no instruction set")
    isa = digest_of(sorted(flags.partition(":")[2].split())).removeprefix("sha256:")[:16]
    libc = "-".join(part for part in platform.libc_ver() if part) or "unknown libc"
    return known(f"{platform.machine()} {libc} isa:{isa}")


def program_of(name: str, environ: Mapping[str, str]) -> str | None:
    """An engine's program: of `READYPLANE_<NAME>_BIN` (a folder stands for its program), else of PATH."""
    told = environ.get(f"READYPLANE_{name.upper()}_BIN", "")
    if not told:
        return shutil.which(name, path=environ.get("PATH"))
    path = Path(told).expanduser()
    return str(path / name if path.is_dir() else path)


def version_here(name: str) -> str | None:
    """Version of a package of this interpreter, None without it."""
    from importlib import metadata  # beside the first bytes of the weights, not before them (R6)

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_here() -> str:
    """This interpreter's name and version."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def content_digest(text: str) -> str:
    """Digest of what lies at a path, files by their names in it; empty when that cannot be said."""
    path = Path(text).expanduser() if names_path(text) else None
    if path is None or not path.is_absolute():
        return ""
    found: dict[str, Any] = {}
    total = 0
    try:
        path = path.resolve()  # a compiler's name is a link more often than not
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if not files or len(files) > CONTENT_FILES_MAX:
            return ""
        for file in files:
            total += file.stat().st_size
            if total > CONTENT_BYTES_MAX:
                return ""
            name = file.relative_to(path).as_posix() if file != path else ""
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, RuntimeError):  # unreadable, or a link that leads to itself
        return ""
    return digest_of(found)
