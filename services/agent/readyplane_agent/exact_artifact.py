"""The artifact of exactly one key, or what the nearest one differs in.

Owns the question to the registry: first by the key's tag, which finds it among any number of
others, then among the model's newest, so that a miss can name its factor. Handed to
`compile_cache` and `kv_reuse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from readyplane.core.compile_key import key_digest
from readyplane.core.errors import NotFound, Refused, Unavailable
from readyplane.core.identity import ArtifactKind, FieldDifference, Manifest
from readyplane.ports import Registry


@dataclass(frozen=True, slots=True)
class Nearest:
    """There is no such artifact.

    Attributes:
        miss: `absent`, `differs`, `refused` or `unreachable`. fields: left is needed, right is found.
    """

    miss: str
    fields: tuple[FieldDifference, ...] = ()
    detail: str = ""


async def exact_artifact(
    registry: Registry, tag: str, *, model: str, kind: ArtifactKind, factors: Mapping[str, str]
) -> Manifest | Nearest:
    """The artifact whose key is `factors`, no field more and none less; never raises for a miss."""
    need = {**{f"key.{n}": v for n, v in factors.items()}, "key_digest": key_digest(factors)}
    nearest = Nearest("absent")
    for reference in (tag, model):
        try:
            found = await registry.resolve_need(
                reference, kind=str(kind), need=need, candidates_max=1
            )
        except NotFound:
            continue
        except Unavailable as error:
            return Nearest("unreachable", detail=str(error))
        except Refused as error:  # nobody trusted has signed it, or it is retired
            return Nearest("refused", detail=str(error))
        if found.manifest is not None:
            return found.manifest
        if found.candidates:
            fields = tuple(
                FieldDifference(f.field.removeprefix("key."), f.left, f.right)
                for f in found.candidates[0].differing
            )
            nearest = Nearest("differs", fields)
    return nearest
