"""`readyplane up --engine vllm` as a person runs it, and what a test asks of it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

READY = "a first pair is routable"
READY_WITHIN_S = 700.0
REACHED_WITHIN_S = 30.0
CLI = (sys.executable, "-m", "readyplane_lab.cli")


class System:
    """One run: its process, its output, its addresses."""

    def __init__(self, folder: Path, model: Path, *arguments: str) -> None:
        self.folder, self.model = folder, model.name
        self.data, self._state = folder / "data", folder / "state"
        self._environment = {
            **os.environ,
            "XDG_STATE_HOME": str(self._state),
            "COLUMNS": "200",
            "NO_COLOR": "1",
        }
        self.process = subprocess.Popen(
            [
                *(*CLI, "up", "--engine", "vllm", "--model", str(model), "--plain", "--no-load"),
                *("--data-dir", str(self.data), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        """What it has said so far."""
        return "\n".join(self.lines)

    @property
    def book(self) -> dict[str, Any]:
        """Its addresses and its token."""
        return dict(json.loads((self._state / "readyplane" / "up.json").read_text()))

    def wait_for(self, needle: str, *, within_s: float = READY_WITHIN_S) -> None:
        """Until it says so."""
        until_s = time.monotonic() + within_s
        while needle not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until_s, self.text + self.logs()
            time.sleep(0.5)

    def end(self) -> int:
        """Ctrl-C, and its exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(120.0)
        finally:
            self._reader.join(10.0)

    def logs(self) -> str:
        """Ends of the workers' logs."""
        found = sorted((self.data / "logs").glob("worker-*.log"))
        return "".join(f"\n--- {p.name}\n{p.read_text()[-3000:]}" for p in found)

    def command(self, *words: str) -> str:
        """What a `readyplane` command prints; repeated while a busy machine keeps it from the service."""
        until_s = time.monotonic() + REACHED_WITHIN_S
        while True:
            done = subprocess.run(
                [*CLI, *words],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                env=self._environment,
            )
            if done.returncode == 0:
                return done.stdout
            said = done.stdout + done.stderr
            assert "cannot be reached" in said and time.monotonic() < until_s, said
            time.sleep(1.0)

    def workers(self) -> list[dict[str, Any]]:
        """As `readyplane workers --json` tells them."""
        return list(json.loads(self.command("workers", "--json"))["workers"])

    def ready(self, role: str) -> list[dict[str, Any]]:
        """Workers of one stage that take requests."""
        return [w for w in self.workers() if w["role"] == role and w["state"] == "ready"]

    def until(self, true: Callable[[], Any], *, within_s: float) -> Any:
        """Until something holds, which is given back."""
        until_s = time.monotonic() + within_s
        while not (found := true()):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until_s, self.text + self.logs()
            time.sleep(1.0)
        return found

    def worker(self, worker_id: str) -> dict[str, Any]:
        """One worker with its checks."""
        return dict(json.loads(self.command("workers", worker_id, "--json")))

    def engine_processes(self, worker_id: str) -> list[psutil.Process]:
        """The processes of a worker's vLLM, its server first."""
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "readyplane_agent" in words and worker_id in words and self._own(process):
                return process.children(recursive=True)
        return []

    def kill_engine(self, worker_id: str) -> list[psutil.Process]:
        """SIGKILL for every process of a worker's vLLM, which are given back."""
        processes = self.engine_processes(worker_id)
        for process in processes:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except (ProcessLookupError, psutil.Error):
                continue
        return processes

    def _own(self, process: psutil.Process) -> bool:
        return any(p.pid == self.process.pid for p in process.parents())


@contextmanager
def running(folder: Path, model: Path, *arguments: str) -> Iterator[System]:
    """A system with a first pair that serves; nothing of it is left at the end."""
    system = System(folder, model, *arguments)
    try:
        system.wait_for(READY)
        yield system
    finally:
        if system.process.poll() is None:
            system.process.send_signal(signal.SIGINT)
            try:
                system.process.wait(90.0)
            except subprocess.TimeoutExpired:
                system.process.send_signal(signal.SIGTERM)
                system.process.wait(60.0)


class Client:
    """Asks the gateway and the engines of a system."""

    def __init__(self, system: System, session: aiohttp.ClientSession) -> None:
        self._system, self._session = system, session
        self._gateway = system.book["gateway_http"]

    async def complete(self, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, document and headers of a completion through the gateway."""
        return await self._post(self._gateway, fields)

    async def chat(self, text: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and document of an answer to one message through the gateway."""
        messages = [{"role": "user", "content": text}]
        url = f"{self._gateway}/v1/chat/completions"
        body = {"model": self._system.model, "messages": messages, **fields}
        async with self._session.post(url, json=body) as response:
            return response.status, await response.json(content_type=None)

    async def ask_engine(self, url: str, **fields: Any) -> dict[str, Any]:
        """A completion by one engine itself."""
        status, doc = await self.at_engine(url, **fields)
        assert status == 200, doc
        return doc

    async def at_engine(self, url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and document of one engine itself, whatever it says."""
        status, doc, _ = await self._post(url, fields)
        return status, doc

    async def _post(
        self, url: str, fields: dict[str, Any]
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        body = {"model": self._system.model, "temperature": 0, **fields}
        async with self._session.post(f"{url}/v1/completions", json=body) as response:
            doc = await response.json(content_type=None)
            return response.status, doc, dict(response.headers)

    async def stream(self, **fields: Any) -> tuple[int, bool, str]:
        """(tokens told at the end, whether it ended with [DONE], the error in it)."""
        body = {
            "model": self._system.model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        tokens, done, error = 0, False, ""
        async with self._session.post(f"{self._gateway}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    done = True
                    continue
                doc = json.loads(line[5:])
                error = error or str(doc.get("error") or "")
                tokens = (doc.get("usage") or {}).get("completion_tokens", tokens)
        return tokens, done, error

    async def metric(self, url: str, name: str, **labels: str) -> float:
        """Sum of one metric, of the samples with these labels; 0 where none has them yet."""
        async with self._session.get(f"{url}/metrics") as response:
            page = await response.text()
        found = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
        assert found or labels, f"{name} is not on the page"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(x.rpartition(" ")[2]) for x in found if all(w in x for w in wanted))
