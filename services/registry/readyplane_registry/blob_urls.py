"""Where bytes lie, as one setting: `--blob-store URL` to a byte store.

Owns the URLs that are understood and what is refused: a misspelled option, and credentials, which
come from the environment variables that every tool of that cloud reads and never from a URL.

    file:///FOLDER             a folder of this machine
    mount:///FOLDER            a folder that all nodes have mounted (tier L3)
    s3://BUCKET/PREFIX         ?endpoint=http://HOST:PORT &region=… &path_style=true
    gs://BUCKET/PREFIX
    az://CONTAINER/PREFIX      ?account=… &endpoint=…
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from readyplane.core.errors import InvalidField
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.blob_objects import ObjectBlobs
from readyplane_registry.blob_removal import FolderRemoval
from readyplane_registry.blobs import ByteStore
from readyplane_registry.collecting import ByteRemoval
from readyplane_registry.fetching import Tally

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 3600.0
FIELD = "blob_store"
OPTIONS = {
    "s3": ("endpoint", "region", "path_style"),
    "gs": (),
    "az": ("account", "endpoint"),
    "file": (),
    "mount": (),
}
SECRET = ("key", "secret", "token", "password", "sas", "credential", "signature")


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A place for bytes.

    Attributes:
        kind: s3, gs, az, file or mount.
        bucket: or container; empty for a folder.
        prefix: below which the blobs lie, without slashes at its ends; of a folder, the folder.
    """

    kind: str
    bucket: str = ""
    prefix: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For messages; holds no credentials, since none are accepted."""
        if self.kind in {"file", "mount"}:
            return f"{self.kind}://{self.prefix}"
        return f"{self.kind}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_store_url(text: str) -> StoreUrl:
    """Read the setting. Raises InvalidField, and never repeats what looks like a credential."""
    parts = urlsplit(text)
    kind = parts.scheme
    if kind not in OPTIONS:
        shown = text.partition("?")[0].rpartition("@")[2]
        raise InvalidField(FIELD, shown, "give file:///, mount:///, s3://, gs:// or az://")
    shown = f"{kind}://{(parts.hostname or '')}{parts.path}"
    if parts.username or parts.password:
        raise InvalidField(FIELD, shown, "leave credentials to the environment, not to the URL")
    if parts.fragment:
        raise InvalidField(FIELD, shown, "leave out what follows #")
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if any(word in name.lower() for word in SECRET):
            raise InvalidField(
                FIELD, f"{shown}?{name}=…", "leave credentials to the environment, not to the URL"
            )
        if name not in OPTIONS[kind] or name in options or not value:
            known = ", ".join(OPTIONS[kind]) or "none"
            raise InvalidField(FIELD, f"{shown}?{name}", f"options of {kind}: {known}, each once")
        options[name] = value
    if kind in {"file", "mount"}:
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
            raise InvalidField(FIELD, shown, f"give {kind}:///ABSOLUTE/FOLDER")
        return StoreUrl(kind, prefix=unquote(parts.path).rstrip("/"))
    _check_bucket(parts.netloc, shown)
    _check_options(options, shown)
    prefix = unquote(parts.path).strip("/")
    if any(part in {"", ".", ".."} for part in prefix.split("/")) and prefix:
        raise InvalidField(FIELD, shown, "give a prefix without empty parts, . and ..")
    return StoreUrl(kind, parts.netloc, prefix, options)


def _check_bucket(bucket: str, shown: str) -> None:
    plain = bucket.replace("-", "").replace(".", "").replace("_", "")
    if not 3 <= len(bucket) <= 63 or not (plain.isascii() and plain.isalnum()):
        raise InvalidField(FIELD, shown, "name a bucket of 3 to 63 letters, digits, - and .")


def _check_options(options: dict[str, str], shown: str) -> None:
    endpoint = options.get("endpoint")
    if endpoint is not None:
        parts = urlsplit(endpoint)
        odd = parts.username or parts.query or parts.fragment or parts.path.strip("/")
        if parts.scheme not in {"http", "https"} or not parts.hostname or odd:
            raise InvalidField(
                FIELD, f"{shown}?endpoint", "give endpoint=http://HOST:PORT or https"
            )
    if options.get("path_style", "true") not in {"true", "false"}:
        raise InvalidField(FIELD, f"{shown}?path_style", "write path_style=true or false")


def open_store(
    text: str, *, clock: Clock, random: Callable[[], float], tally: Tally | None = None
) -> ByteStore:
    """The byte store at a URL. Raises InvalidField; a store that is away is found when it is asked.

    Credentials come from the environment: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    `AWS_SESSION_TOKEN` or a web identity; `GOOGLE_APPLICATION_CREDENTIALS`; `AZURE_STORAGE_…`.
    """
    url = parse_store_url(text)
    if url.kind in {"file", "mount"}:
        tier = WeightTier.L3_RACK if url.kind == "mount" else WeightTier.L4_OBJECT
        return FileBlobs(Path(url.prefix), tier=tier)
    try:
        store = _object_store(url)
    except Exception as error:
        told = str(error).strip().splitlines()
        raise InvalidField(
            FIELD,
            url.name,
            f"check its options ({told[0][:200] if told else type(error).__name__})",
        ) from error
    return ObjectBlobs(store, name=url.name, clock=clock, random=random, tally=tally)


def removal_of(store: ByteStore, clock: Clock) -> ByteRemoval:
    """The same store as collection needs it."""
    if isinstance(store, ObjectBlobs):
        return store
    if isinstance(store, FileBlobs):
        return FolderRemoval(store.root, clock)
    raise TypeError(f"{type(store).__name__} cannot be collected")


def _object_store(url: StoreUrl) -> Any:
    endpoint = url.options.get("endpoint", "")
    shared: dict[str, Any] = {
        "prefix": url.prefix or None,
        "client_options": {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            # Of a whole answer, streamed; how long one piece may take is bounded by the reader.
            "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
        },
        # Tried again by `ObjectBlobs`, within one budget for all calls.
        "retry_config": {"max_retries": 0},
    }
    config: Any = {}
    if endpoint:
        config["endpoint"] = endpoint
    if url.kind == "s3":
        if "region" in url.options:
            config["region"] = url.options["region"]
        config["virtual_hosted_style_request"] = url.options.get("path_style", "true") == "false"
        return S3Store(url.bucket, config=config, **shared)
    if url.kind == "gs":
        return GCSStore(url.bucket, config=config, **shared)
    if "account" in url.options:
        config["account_name"] = url.options["account"]
    return AzureStore(url.bucket, config=config, **shared)
