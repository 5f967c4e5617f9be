"""`readyplane doctor` over a registry's own HTTP side: what lacks bytes is named, with what to do."""

import asyncio
import itertools
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from readyplane.core.errors import Unavailable
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.http import make_app
from readyplane_lab.cli import doctor_bytes
from readyplane_lab.cli.finding import Finding
from readyplane_registry import api
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.blob_http import BlobRoutes
from readyplane_registry.fetching import NoTally
from readyplane_registry.ingest import publish_directory
from readyplane_registry.live import MemoryLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.registry_data import model_folder
from tests.unit.cli_world import clean_environment


@asynccontextmanager
async def registry_with(tmp_path: Path, tags: tuple[str, ...]) -> AsyncIterator[str]:
    """The URL of a registry in which a model has these tags; its bytes lie in `blobs`."""
    clock, ids = SystemClock(), itertools.count()
    blobs = FileBlobs(tmp_path / "blobs")
    service = RegistryService(
        store=MemoryCatalog(),
        live=MemoryLive(clock, weight=0.3),
        blobs=blobs,
        clock=clock,
        make_id=lambda: str(next(ids)),
    )
    app = make_app("registry", TokenCheck(""), set(), lambda: (True, ""))
    app.include_router(api.routes(service))
    app.include_router(BlobRoutes(service, blobs, NoTally()).router)
    door = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    serving = asyncio.create_task(web.serve(sockets=[door]))
    try:
        folder = model_folder(tmp_path / "model")
        for tag in tags:
            await publish_directory(folder, model="m", registry=service, sink=blobs, tag=tag)
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
    finally:
        web.should_exit = True
        await serving


async def found_at(url: str) -> list[Finding]:
    return [f async for f in doctor_bytes.findings({"registry_http": url})]


def biggest(root: Path) -> Path:
    return max((p for p in root.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(root: Path) -> None:
    blob = biggest(root)
    blob.chmod(0o644)
    with blob.open("r+b") as file:
        file.truncate(7)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean_environment(monkeypatch, tmp_path / "state")


async def test_all_that_tags_point_at_is_there(tmp_path: Path) -> None:
    async with registry_with(tmp_path, ("m:1", "m:2")) as url:
        (found,) = await found_at(url)
    assert (found.status, found.remedy) == ("ok", "")
    assert found.found == "all 5 files of 1 tagged artifacts are there"


@pytest.mark.parametrize(
    ("spoil", "told", "count"),
    [
        (lambda root: biggest(root).unlink(), "is missing", 1),
        (cut, "has 7 of ", 1),
        (shutil.rmtree, "is missing", 5),
    ],
)
async def test_what_is_missing_or_too_short_is_named(
    tmp_path: Path, spoil: Callable[[Path], None], told: str, count: int
) -> None:
    async with registry_with(tmp_path, ("m:1", "m:2")) as url:
        spoil(tmp_path / "blobs")
        (found,) = await found_at(url)
    assert found.status == "fail" and "m:1" in found.name and "m:2" in found.name
    assert found.found.count(told) == count and "publish it again" in found.remedy


async def test_a_store_that_does_not_answer_is_no_loss_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> int:
        await asyncio.sleep(0)
        raise Unavailable("the store is away", "wait")

    async with registry_with(tmp_path, ("m:1",)) as url:
        monkeypatch.setattr(FileBlobs, "length", away)
        (found,) = await found_at(url)
    assert (found.name, found.status) == ("byte store", "fail")
    assert "503" in found.found and "--blob-store" in found.remedy


async def test_what_was_not_looked_at_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_bytes, "ARTIFACTS_MAX", 0)
    async with registry_with(tmp_path, ("m:1",)) as url:
        (found,) = await found_at(url)
    assert found.status == "warn" and "0 of 1" in found.found and found.remedy


async def test_a_registry_that_is_gone(tmp_path: Path) -> None:
    async with registry_with(tmp_path, ()) as url:
        (found,) = await found_at(url)
        assert found.status == "ok"
    (found,) = await found_at(url)
    assert found.status == "fail" and found.remedy
    assert [f async for f in doctor_bytes.findings({"registry_http": ""})] == []
