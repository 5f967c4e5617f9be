"""The committed generated code is what the contract generates, and nothing else."""

import subprocess
from pathlib import Path

import pytest

from tests.tidy import tree

GENERATOR = tree.ROOT / ".venv-gen" / "bin" / "python"


def generated(root: Path) -> dict[str, bytes]:
    """The generated modules under a root, by their path below it."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in (root / "readyplane").rglob("*_pb2*.py*")
        if "__pycache__" not in path.parts
    }


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    if not GENERATOR.exists():
        pytest.skip("no .venv-gen: `make check` creates the generator's environment")
    subprocess.run([tree.ROOT / "tools" / "generate.sh", tmp_path], check=True, timeout=60)
    wanted, found = generated(tmp_path), generated(tree.ROOT)
    stale = sorted(
        name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
    )
    assert not stale, "run `make generate`, these differ from proto/:\n  " + "\n  ".join(stale)


def test_every_proto_has_its_module() -> None:
    """Says it without the generator's environment: each contract file was generated once."""
    protos = {
        name.removeprefix("proto/").removesuffix(".proto")
        for name in tree.files()
        if name.startswith("proto/readyplane/") and name.endswith(".proto")
    }
    modules = {
        name.removesuffix("_pb2.py")
        for name in tree.files()
        if name.startswith("readyplane/") and name.endswith("_pb2.py")
    }
    assert modules == protos


def test_a_difference_would_be_seen(tmp_path: Path) -> None:
    module = tmp_path / "readyplane" / "v1" / "worker_pb2.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\n")
    before = generated(tmp_path)
    module.write_text("x = 2\n")
    assert before.keys() == generated(tmp_path).keys() == {"readyplane/v1/worker_pb2.py"}
    assert before != generated(tmp_path)
