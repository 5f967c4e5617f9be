"""An artifact as an OCI image layout with ModelPack's media types: the documents, byte for byte. Pure.

Owns which file becomes which layer and what config, manifest and index say. Layers are raw: the
files as they are, neither archived nor compressed, so that a layer's digest is the file's sha256 and
the same artifact gives the same bytes on every machine. OCI knows no chunk checksums, so the
artifact's own manifest goes along as one more layer. Handed to `oci_export`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from readyplane.core.identity import FileEntry, Manifest, canonical

IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX = "application/vnd.oci.image.index.v1+json"
ARTIFACT_TYPE = "application/vnd.cnai.model.manifest.v1+json"
CONFIG = "application/vnd.cnai.model.config.v1+json"
WEIGHTS = "application/vnd.cnai.model.weight.v1.raw"
SETTINGS = "application/vnd.cnai.model.weight.config.v1.raw"
OTHER = "application/vnd.cnai.model.doc.v1.raw"
LAYER_OF = {"weights": WEIGHTS, "config": SETTINGS, "tokenizer": SETTINGS}
PATH_KEY = "org.cnai.model.filepath"
DIGEST_KEY = "dev.readyplane.manifest.digest"
NAME_KEY = "org.opencontainers.image.ref.name"
OWN_PATH = ".readyplane/manifest.json"
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


@dataclass(frozen=True, slots=True)
class Layout:
    """What a layout folder holds.

    Attributes:
        digest: of the OCI manifest, what others name the artifact by.
        documents: small blobs by sha256: OCI manifest, config, and the artifact's own manifest.
        files: what becomes a layer as it is, each content once.
        index: `index.json`.
    """

    digest: str
    documents: dict[str, bytes]
    files: tuple[FileEntry, ...]
    index: bytes


def layout_of(manifest: Manifest, *, name: str = "") -> Layout:
    """The layout of an artifact.

    Args:
        name: under which it is listed in the index, for example a tag.
    """
    own = canonical(manifest.document())
    layers = [
        *(
            _descriptor(LAYER_OF.get(f.purpose, OTHER), f.sha256, f.size_bytes, f.path)
            for f in manifest.files
        ),
        _descriptor(SETTINGS, manifest.digest, len(own), OWN_PATH),
    ]
    config = _json(
        {
            "config": _facts(manifest),
            "descriptor": {"name": manifest.model, "version": manifest.digest},
            "modelfs": {"diff_ids": [layer["digest"] for layer in layers], "type": "layers"},
        }
    )
    image = _json(
        {
            "annotations": {DIGEST_KEY: manifest.digest},
            "artifactType": ARTIFACT_TYPE,
            "config": {"digest": _sha256(config), "mediaType": CONFIG, "size": len(config)},
            "layers": layers,
            "mediaType": IMAGE_MANIFEST,
            "schemaVersion": 2,
        }
    )
    listed: dict[str, Any] = {
        "artifactType": ARTIFACT_TYPE,
        "digest": _sha256(image),
        "mediaType": IMAGE_MANIFEST,
        "size": len(image),
    }
    if name:
        listed["annotations"] = {NAME_KEY: name}
    index = _json({"manifests": [listed], "mediaType": IMAGE_INDEX, "schemaVersion": 2})
    return Layout(
        digest=_sha256(image),
        documents={_sha256(data): data for data in (image, config, own)},
        files=tuple({f.sha256: f for f in manifest.files}.values()),
        index=index,
    )


def _facts(manifest: Manifest) -> dict[str, str]:
    """The technical metadata that is known; what is not is left out."""
    dtypes = {tensor.dtype for tensor in manifest.tensors}
    facts = {"format": manifest.layout.partition("/")[0]}
    if dtypes:
        facts["precision"] = dtypes.pop().lower() if len(dtypes) == 1 else "mixed"
    if manifest.quantisation != "none":
        facts["quantization"] = manifest.quantisation
    return facts


def _descriptor(kind: str, digest: str, size: int, path: str) -> dict[str, Any]:
    return {
        "annotations": {PATH_KEY: path},
        "digest": digest,
        "mediaType": kind,
        "size": size,
    }


def _json(document: object) -> bytes:
    """One text for one document: sorted, without spaces."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
