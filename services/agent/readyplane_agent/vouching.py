"""Whether anybody trusted vouches for what is about to be loaded: the agent's own look (R10.2).

Owns the order of the check: policy file, signatures as the registry holds them, verdict of
`core.trust`. The registry is not believed about it: public keys come from the agent's own policy,
and the digest is that of the manifest in hand. Called by `starting` before anything is fetched.
"""

from __future__ import annotations

import logging
from pathlib import Path

from readyplane.core.errors import Refused
from readyplane.core.identity import Manifest
from readyplane.core.trust import TrustMode, trusted
from readyplane.kit.clock import Clock
from readyplane.ports import Registry

log = logging.getLogger("agent.start")


def check_trust_file(trust_file: Path | None) -> None:
    """Refuse a policy that cannot be read before anything is asked of anybody.

    Raises:
        InvalidField: the policy's file is not there or wrong.
    """
    if trust_file is None:
        return
    from readyplane.kit.signing import TrustFile

    TrustFile(trust_file)


async def refuse_untrusted(
    manifest: Manifest, *, registry: Registry, trust_file: Path | None, clock: Clock
) -> str:
    """One sentence on who vouches for it; empty when nobody is asked for.

    Raises:
        Refused: the policy requires signatures, and they are not there; names the keys expected.
        InvalidField: the policy's file is wrong. Unavailable: the registry is away.
    """
    if trust_file is None:
        return ""
    # Imported here: most agents have no policy, and a start waits for every import (R6).
    from readyplane.kit.signing import TrustFile, verify_ed25519

    policy = TrustFile(trust_file).policy()
    if policy.of(manifest.model).mode is TrustMode.OFF:
        return ""
    trail = await registry.trail(manifest.digest)
    verdict = trusted(
        manifest.digest,
        trail.signatures,
        policy,
        model=manifest.model,
        now_s=clock.wall_s(),
        verify=verify_ed25519,
    )
    if not verdict.allowed:
        remedy = "sign it (`readyplane artifact sign REF --key FILE`), or order a signed one"
        raise Refused("trust", [verdict.reason], remedy)
    if not verdict.verified:
        log.warning("loaded although not trusted: %s", verdict.reason)
    return verdict.reason
