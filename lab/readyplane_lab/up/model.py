"""Publishes the model that a local stack serves, through the registry's own door.

Bytes go over HTTP and the manifest over gRPC, as for any publisher; what is already there is not
sent again.
"""

from __future__ import annotations

from readyplane.ports import Registry
from readyplane_lab.up.demo_model import DemoModel
from readyplane_registry.ingest import Facts, RemoteBlobs, publish_directory


async def publish_model(
    registry: Registry, made: DemoModel, *, model: str, tag: str, http: str, token: str
) -> str:
    """Publish the demo model under a tag; returns the manifest's digest.

    Args:
        registry: the gRPC door. http: base URL of the byte store.

    Raises:
        InvalidField: a file that is not what it says. Conflict: the tag moved meanwhile.
    """
    published = await publish_directory(
        made.folder,
        model=model,
        registry=registry,
        sink=RemoteBlobs(http, token=token),
        facts=Facts(config=made.config, canary=made.canary),
        tag=tag,
    )
    return published.digest
