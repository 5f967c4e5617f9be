"""The artifacts of a simulated world: identities without bytes, and which one is meant now.

Owns the part of a registry that router and planner read. A new revision is another identity, so its
workers exchange no KV with those of the revision before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from readyplane.core.errors import NotFound
from readyplane.core.identity import ArtifactKind, Canary, FileEntry, Manifest, TensorEntry
from readyplane.core.profile import ClassProfile
from readyplane.ports import FetchPlan, RankedSource, StartChoice, StartNode, StartPlacement


class Artifacts:
    """Revisions of one model; every name means the newest.

    Attributes:
        newest: what new workers are to serve. way: of the weights to a machine.
    """

    def __init__(self, model: str) -> None:
        self.way: Callable[[str, str], tuple[RankedSource, ...]] = lambda _node, _digest: ()
        self._model = model
        self._known: dict[str, Manifest] = {}
        self._slowness: dict[str, float] = {}
        self.newest = self.publish()

    def publish(self, slowness: float = 1.0) -> Manifest:
        """Another revision, from now on the newest, whose engines take that many times longer."""
        self.newest = one_tensor_manifest(self._model, len(self._known))
        self._known[self.newest.digest] = self.newest
        self._slowness[self.newest.digest] = slowness
        return self.newest

    def run_by(self, profile: ClassProfile, digest: str) -> ClassProfile:
        """What a worker of that class does when it serves that revision."""
        slowness = self._slowness.get(digest, 1.0)
        if slowness == 1.0:
            return profile
        return replace(profile, slow_factor=profile.slow_factor * slowness)

    def of(self, digest: str) -> Manifest:
        """By digest.

        Raises:
            NotFound: no such revision.
        """
        if digest not in self._known:
            raise NotFound("artifact", digest)
        return self._known[digest]

    async def get_manifest(self, digest: str) -> Manifest:
        """See `ports.Registry`."""
        return self.of(digest)

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        """See `ports.Registry`."""
        del reference, kind, need
        return self.newest

    async def plan_fetch(
        self, digest: str, *, worker_id: str, incarnation: str, node: str
    ) -> FetchPlan:
        """See `ports.Registry`."""
        del worker_id, incarnation
        return FetchPlan(self.way(node, digest))

    async def place_start(
        self, digest: str, *, nodes: Sequence[StartNode], starts: int = 1, layout_digest: str = ""
    ) -> StartPlacement:
        """See `ports.Registry`; every node with its soonest way, the soonest node first."""
        del starts, layout_digest
        found: list[StartChoice] = []
        excluded: list[str] = []
        for node in nodes:
            ways = self.way(node.node, digest)
            if not ways:
                excluded.append(f"node {node.node}: nobody gives the artifact")
                continue
            best = min(ways, key=lambda ranked: ranked.predicted_s)
            init_s = node.runtime_init_s or 0.0
            total_s = node.queue_s + best.predicted_s + init_s
            found.append(
                StartChoice(
                    node.node, best.source, node.queue_s, best.predicted_s, init_s, total_s,
                    best.why,
                )
            )  # fmt: skip
        found.sort(key=lambda choice: (choice.total_s, choice.node))
        return StartPlacement(tuple(found[:1]), tuple(found[1:]), tuple(excluded))


def one_tensor_manifest(model: str, revision: int = 0) -> Manifest:
    """An artifact of one tensor: the simulator moves no bytes, but the gate asks for identity."""
    zero = "0" * 32
    return Manifest(
        kind=ArtifactKind.WEIGHTS,
        model=model,
        files=(FileEntry("model.safetensors", 4096, f"sha256:{revision:064x}", (zero,)),),
        tensors=(TensorEntry("w", "U8", (1024,), "model.safetensors", 0, 1024),),
        config={"max_model_len": 131_072, "vocab_size": 512, "eos_token_id": 2, "block_size": 16},
        canary=Canary((3, 4, 5), (6, 7)),
    )
