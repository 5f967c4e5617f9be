"""The model that a local stack serves, and its publication through the registry's own door.

Bytes go over HTTP and the manifest over gRPC, as for any publisher; what is already there is not
sent again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from readyplane.ports import Registry
from readyplane_registry.ingest import Facts, RemoteBlobs, publish_directory


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is published and then served.

    Attributes:
        name: model name that requests use. tag: of the artifact.
        folder: its files. facts: what the manifest says beside them, the known answer among it.
    """

    name: str
    tag: str
    folder: Path
    facts: Facts


async def publish_model(registry: Registry, served: ServedModel, *, http: str, token: str) -> str:
    """Publish the model under its tag; returns the manifest's digest.

    Args:
        registry: the gRPC door. http: base URL of the byte store.

    Raises:
        InvalidField: a file that is not what it says. Conflict: the tag moved meanwhile.
    """
    published = await publish_directory(
        served.folder,
        model=served.name,
        registry=registry,
        sink=RemoteBlobs(http, token=token),
        facts=served.facts,
        tag=served.tag,
    )
    return published.digest
