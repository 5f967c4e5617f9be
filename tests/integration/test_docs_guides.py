"""The guides work as written: their shell and Python blocks are run against a running system."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.deploy_files import ROOT
from tests.integration.conftest import FullStack

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 180.0


def blocks(document: str, kind: str) -> list[str]:
    return [b for k, b in FENCED.findall((ROOT / document).read_text()) if k == kind]


@pytest.fixture
def home(full_stack: FullStack, tmp_path: Path) -> Path:
    """A user's home with the address book where the guides look, and `.venv` as in a clone."""
    del full_stack  # it has written the book
    book = Path(os.environ["XDG_STATE_HOME"])
    (tmp_path / ".local").mkdir()
    (tmp_path / ".local/state").symlink_to(book)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    return tmp_path


async def run(home: Path, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=home,
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(LIMIT_S):
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()


async def test_your_gateway_by_rest(home: Path) -> None:
    script = "set -euo pipefail\n" + "\n".join(blocks("docs/your-gateway.md", "sh"))
    said = await run(home, "bash", "-c", script)
    pair = json.loads((home / "pair.json").read_text())
    assert pair["reservation_id"] == "r-1.0" and not pair["local"]
    handed = json.loads((home / "prefilled.json").read_text())["kv_transfer_params"]
    assert handed["remote_engine_id"] == pair["prefill"]["incarnation"]
    answer = json.loads(re.search(r'\{"id": "cmpl-.*?"kv_transfer_params": null\}', said).group())  # type: ignore[union-attr]
    assert answer["usage"]["completion_tokens"] > 0
    assert '{"unknown":0}' in said
    assert '"reason":"NotFound"' in said
    shown = json.loads(blocks("docs/your-gateway.md", "json")[0])
    assert shown.keys() == pair.keys(), "the answer shown in the guide is the answer"


async def test_your_gateway_by_grpc(home: Path) -> None:
    script = home / "guide.py"
    script.write_text(blocks("docs/your-gateway.md", "python")[0])
    said = await run(home, sys.executable, str(script))
    assert re.fullmatch(r"http://\S+ http://\S+ \d+\.\d\d s\n0 unknown\n", said)


async def test_profiles(home: Path) -> None:
    """Those of its blocks that need no engine of a class of one's own."""
    said = await run(
        home, "bash", "-c", "set -euo pipefail\n" + "\n".join(blocks("docs/profiles.md", "sh"))
    )
    assert "h200-llama8b-fp8" in said and "iteration_ms" in said
    assert json.loads((home / "b300.json").read_text())["measured"] is False
    assert '"measured": false' in said


async def test_the_readme(home: Path, full_stack: FullStack) -> None:
    """What its blocks ask of a running system; ports are this system's own."""
    asked = [b for b in blocks("README.md", "sh") if "curl" in b or "workers   " in b]
    assert len(asked) == 3
    script = "\n".join(asked).replace("http://127.0.0.1:8000", full_stack.book.gateway_http)
    said = await run(home, "bash", "-c", f"set -euo pipefail\n{script}")
    assert "data: [DONE]" in said
    assert '"reservation_id":"readme-1.0"' in said.replace('": "', '":"')
    assert '{"unknown":0}' in said
    assert " 0 failures" in said, "doctor"
