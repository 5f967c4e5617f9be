"""The registry's port: what is immutable, and who holds the bytes now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from readyplane.core.chunks import ChunkRanges
from readyplane.core.identity import Manifest
from readyplane.core.resolution import CANDIDATES_SHOWN_MAX, Resolution
from readyplane.core.startup import WeightTier
from readyplane.core.trust import Trail


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """A line about one manifest."""

    digest: str
    kind: str
    model: str
    size_bytes: int
    file_count: int
    tensor_count: int
    created_s: float
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tag:
    """A mutable name and the digest it points at; `version` grows with every change."""

    name: str
    digest: str
    version: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Source:
    """Who can give the bytes of an artifact: `{url}/{path}` serves ranges of every file.

    Attributes:
        readers: places taken now, told by the registry; what an announcement says of it is ignored.
        partial: it is still loading, and has verified only the chunks of `held` yet (numbered as in
            `core.chunks`). It announces itself so before it plans its own fetch, with nothing held,
            and again as it gets on: a later starter may then read behind it (R8.4). What it holds
            is a lower bound: it may hold more when asked, never fewer.
        layout_digest: the layout in which the bytes lie there; empty: as in the manifest.
        slo_share: the larger of TTFT and TPOT of the requests that this worker serves, as a share
            of its target; None when it serves nobody or does not know (R9.1).
        draining: takes no new readers; those that read may finish (R22.3).
    """

    source_id: str
    digest: str
    tier: WeightTier
    url: str
    worker_id: str = ""
    incarnation: str = ""
    node: str = ""
    bandwidth_bytes_per_s: float = 0.0
    readers: int = 0
    readers_max: int = 2
    partial: bool = False
    held: ChunkRanges = ()
    layout_digest: str = ""
    slo_share: float | None = None
    draining: bool = False
    rack: str = ""


@dataclass(frozen=True, slots=True)
class RankedSource:
    """A source at its place in a plan, with the predicted seconds and why it stands there.

    Attributes:
        gives: which of the missing chunks it holds already.
        complete_in_s: until it holds all of them; None when it does, or when nobody knows.
    """

    source: Source
    predicted_s: float
    why: str
    gives: ChunkRanges = ()
    complete_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Sources best first; `excluded` says who was left out and why.

    The first source is the parent in the fan-out: read all that is missing from it, waiting for
    chunks that it will hold soon; the others are for when it fails, stalls or refuses. Then plan
    anew with what is still missing. `retry_after_s` is set when nobody has a place now.
    """

    sources: tuple[RankedSource, ...]
    excluded: tuple[str, ...] = ()
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A reader's place at a source, for `ttl_s` unless renewed.

    Attributes:
        source_incarnation, layout_digest: of the source; an answer with others is not from it.
        bytes_per_s: how fast to read at most, so that serving is not harmed; 0: no bound.
        readers: of the source now, this one included; 0: not told.
    """

    transfer_id: str
    ttl_s: float
    source_incarnation: str = ""
    layout_digest: str = ""
    bytes_per_s: float = 0.0
    readers: int = 0


@dataclass(frozen=True, slots=True)
class StartNode:
    """A node where a worker could start.

    Attributes:
        queue_s: until a place is free there (T_queue).
        runtime_init_s: what a start takes there besides queue and artifact; None: as elsewhere.
        ingress_bytes_per_s: how fast bytes can come in at all; 0: not known.
        places: how many can start there.
    """

    node: str
    rack: str = ""
    queue_s: float = 0.0
    runtime_init_s: float | None = None
    ingress_bytes_per_s: float = 0.0
    places: int = 1


@dataclass(frozen=True, slots=True)
class StartChoice:
    """One start on one node from one source: T_queue + T_artifact + T_runtime_init, and why."""

    node: str
    source: Source
    queue_s: float
    artifact_s: float
    runtime_init_s: float
    total_s: float
    why: str


@dataclass(frozen=True, slots=True)
class StartPlacement:
    """Where starts should go (R8.2): `choices` one for each, in the order they would be given.

    Attributes:
        alternatives: the best of every other node for the first start, best first.
        excluded: nodes and sources that were left out, each with its reason.
    """

    choices: tuple[StartChoice, ...]
    alternatives: tuple[StartChoice, ...] = ()
    excluded: tuple[str, ...] = ()


class Registry(Protocol):
    """What is immutable, and who holds the bytes now."""

    async def publish_manifest(
        self, document: Mapping[str, Any], *, bytes_elsewhere: bool = False
    ) -> tuple[str, bool]:
        """Store a manifest; returns (digest, created). Idempotent by content."""
        ...

    async def get_manifest(self, digest: str) -> Manifest:
        """One manifest. Raises NotFound."""
        ...

    async def list_manifests(self, *, model: str = "", kind: str = "") -> list[ManifestSummary]:
        """Newest first."""
        ...

    async def set_tag(
        self, name: str, digest: str, *, expected_digest: str = "", force: bool = False
    ) -> Tag:
        """Compare-and-set. Raises Conflict when another digest is found, NotFound."""
        ...

    async def remove_tag(self, name: str, *, expected_digest: str = "", force: bool = False) -> Tag:
        """Take a tag away by compare-and-set; its history stays. Raises Conflict, NotFound."""
        ...

    async def sign_manifest(self, digest: str, *, public_key: bytes, envelope: str) -> bool:
        """Store a signature that verifies; False when this key had signed it before."""
        ...

    async def record_origin(self, digest: str, origin: Mapping[str, str]) -> None:
        """Note beside it where an artifact's bytes came from."""
        ...

    async def trail(self, digest: str) -> Trail:
        """What was said of a manifest since it was published. Raises NotFound."""
        ...

    async def hold_upload(
        self, upload_id: str, sha256: Sequence[str], *, release: bool = False
    ) -> float:
        """Keep bytes that are about to be published from being collected; returns the ttl in s."""
        ...

    async def list_tags(self, name: str = "") -> list[Tag]:
        """Current tags, or the history of one, newest first."""
        ...

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        """By digest, tag or model name. Raises NotFound or IdentityMismatch naming the fields."""
        ...

    async def resolve_need(
        self,
        reference: str,
        *,
        kind: str,
        need: Mapping[str, str],
        candidates_max: int = CANDIDATES_SHOWN_MAX,
    ) -> Resolution:
        """As `resolve`; what misses is an answer with the nearest candidates. Raises NotFound."""
        ...

    async def announce_source(self, source: Source) -> float:
        """Announce or refresh; returns the ttl in seconds."""
        ...

    async def withdraw_source(self, source_id: str, *, reason: str = "") -> None:
        """Take a source back at once."""
        ...

    async def plan_fetch(
        self,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        node: str,
        missing: ChunkRanges = (),
        rack: str = "",
        layout_digest: str = "",
    ) -> FetchPlan:
        """Sources for one target, best first; `missing` empty means every chunk."""
        ...

    async def place_start(
        self, digest: str, *, nodes: Sequence[StartNode], starts: int = 1, layout_digest: str = ""
    ) -> StartPlacement:
        """Where to start next, over (node, source). Raises NotFound, InvalidField."""
        ...

    async def acquire_transfer(
        self,
        source_id: str,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        request_id: str,
        source_incarnation: str = "",
        layout_digest: str = "",
        readers_seen: int | None = None,
    ) -> Transfer:
        """Reserve a reader's place, or renew it with the same `request_id`.

        Give what the plan said of the source: its incarnation, the layout needed, its readers. Of
        many starters that planned at once one gets the place, the others plan anew and find it as
        the one to read behind.

        Raises:
            Overloaded: the source is full, leaves, is barred, or has more readers than planned.
            NotFound: the source is gone, or holds another artifact.
            StaleEpoch: it is another life of the source than the one expected.
            IdentityMismatch: its bytes lie in another layout.
        """
        ...

    async def release_transfer(
        self, transfer_id: str, *, transferred_bytes: int, elapsed_s: float, failure: str = ""
    ) -> bool:
        """Give the place back; True when the source was quarantined for lying."""
        ...
