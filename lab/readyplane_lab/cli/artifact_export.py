"""`readyplane artifact export`: an artifact as a folder that other tools read.

Owns the reading of its bytes from the registry and what is printed; the layout is the registry's
`oci`. Its command is added to the `artifact` group by `app`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from readyplane.core.errors import Unavailable
from readyplane_lab.cli import output
from readyplane_lab.cli.artifact import Reference, resolve
from readyplane_lab.cli.flags import Json, examples
from readyplane_lab.cli.where import RegistryAddress, RegistryHttp, Where, find, registry_of, run

if TYPE_CHECKING:
    from readyplane.core.identity import FileEntry, Manifest
    from readyplane_registry.oci import Layout

EXPORT_EXAMPLES = examples(
    "readyplane artifact export demo:latest --oci ./demo-oci",
    "readyplane artifact export sha256:… --oci ./out --json",
)
PIECE_BYTES = 1024 * 1024
PIECE_S_MAX = 60.0


def export(
    reference: Reference,
    oci: Annotated[
        Path,
        typer.Option("--oci", metavar="DIR", help="Folder of the OCI image layout; new or empty."),
    ],
    json: Json = False,
    registry: RegistryAddress = "",
    registry_http: RegistryHttp = "",
) -> None:
    """Write an artifact as an OCI image layout with ModelPack's media types.

    Layers are the files as they are, and every byte is verified; the same artifact gives the same
    layout everywhere. What was broken off is taken up again.
    """
    where = find("registry", "registry_http", registry=registry, registry_http=registry_http)
    with output.console(stderr=True).status("writing the layout"):
        manifest, layout, fetched = run(_export(where, reference, oci))
    if json:
        output.emit(
            {
                "digest": manifest.digest,
                "oci_digest": layout.digest,
                "folder": str(oci),
                "fetched_bytes": fetched,
            }
        )
        return
    output.say(f"{manifest.model} {output.short(manifest.digest)} is {layout.digest} in {oci}")
    output.say(
        f"{len(manifest.files)} files, {output.size(fetched)} read; push it with any OCI tool"
    )


async def _export(where: Where, reference: str, folder: Path) -> tuple[Manifest, Layout, int]:
    from readyplane_registry import oci_export

    async with registry_of(where) as registry:
        manifest = await resolve(registry, reference)
    name = "" if reference.startswith("sha256:") else reference
    layout, fetched = await oci_export.export(
        manifest, folder, read=lambda entry: stored_bytes(where, manifest.digest, entry), name=name
    )
    return manifest, layout, fetched


async def stored_bytes(where: Where, digest: str, entry: FileEntry) -> AsyncIterator[bytes]:
    """The bytes of one file from the registry's store. Raises Unavailable."""
    import aiohttp

    from readyplane.kit.auth import token_headers
    from readyplane.wire import error_from_document

    limits = aiohttp.ClientTimeout(total=None, connect=5.0, sock_read=PIECE_S_MAX)
    url = f"{where.registry_http}/v1/blobs/{digest}/{quote(entry.path)}"
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, headers=token_headers(where.token)) as session,
            session.get(url) as answer,
        ):
            if answer.status >= 400:
                raise error_from_document(
                    await answer.json(content_type=None), status=answer.status
                )
            async for piece in answer.content.iter_chunked(PIECE_BYTES):
                yield piece
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(
            f"{entry.path} cannot be read from {where.registry_http} "
            f"({str(error) or type(error).__name__})",
            "run the same command again, it goes on where it was",
        ) from error
