"""`readyplane artifact sign`, `key new`, `retire` and `gc`: who vouches for artifacts, and what stays.

Owns what these commands print; the rules are the registry's. Its commands are added to the
`artifact` group by `app`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import Conflict, ReadyplaneError, Refused
from readyplane_lab.cli import output
from readyplane_lab.cli.artifact import Reference, resolve
from readyplane_lab.cli.flags import Json, examples, switch
from readyplane_lab.cli.where import (
    PlannerAddress,
    RegistryAddress,
    RegistryHttp,
    Where,
    ask_http,
    find,
    planner_of,
    registry_of,
    run,
    within,
)

if TYPE_CHECKING:
    from readyplane.ports import Tag

SIGN_EXAMPLES = examples("readyplane artifact sign demo:latest --key release.pem")
KEY_EXAMPLES = examples("readyplane artifact key new release.pem")
RETIRE_EXAMPLES = examples("readyplane artifact retire sha256:… --reason superseded")
UNTAG_EXAMPLES = examples(
    "readyplane artifact untag demo:old", "readyplane artifact untag demo:old --expected sha256:…"
)
GC_EXAMPLES = examples("readyplane artifact gc --dry-run", "readyplane artifact gc --json")
COLLECT_S_MAX = 3600.0
POLICY_S_MAX = 5.0
KEPT_SHOWN_MAX = 20

key_app = typer.Typer()


@key_app.command("new", epilog=KEY_EXAMPLES)
def key_new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the private key is to be.")],
    json: Json = False,
) -> None:
    """Make an Ed25519 key: FILE for you alone, FILE.pub for others; neither is ever overwritten.

    Prints what a trust policy says of it.
    """
    import base64

    from readyplane.kit.signing import SigningKey

    made = SigningKey.new(file)
    public = base64.b64encode(made.public_key).decode()
    if json:
        output.emit({"key_id": made.key_id, "public_key": public, "file": str(file)})
        return
    output.say(f"key {made.key_id}")
    output.say(f"{file} signs: keep it; {file}.pub is for others")
    output.say(f'for a trust policy: "keys": {{"{file.stem}": {{"public_key": "{public}"}}}}')


def sign(
    reference: Reference,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key (`artifact key new`).")],
    json: Json = False,
    registry: RegistryAddress = "",
) -> None:
    """Sign an artifact: its manifest's digest, and so every byte that the manifest names."""
    from readyplane.kit.signing import SigningKey

    signer = SigningKey.read(key)
    where = find("registry", registry=registry)
    digest, created = run(_sign(where, reference, signer))
    if json:
        output.emit({"digest": digest, "key_id": signer.key_id, "created": created})
        return
    output.say(f"{'signed' if created else 'already signed'} {digest}")
    output.say(f"by {signer.key_id}")


async def _sign(where: Where, reference: str, signer: Any) -> tuple[str, bool]:
    async with registry_of(where) as registry:
        digest = (await resolve(registry, reference)).digest
        created = await registry.sign_manifest(
            digest, public_key=signer.public_key, envelope=signer.envelope(digest)
        )
        return digest, created


def untag(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.")],
    expected: Annotated[
        str,
        typer.Option(metavar="DIGEST", help="Where it must point now (default: where it does)."),
    ] = "",
    force: Annotated[bool, switch("--force", text="From wherever it points.")] = False,
    although_used: Annotated[
        bool, switch("--although-used", text="Also while the planner's policy names it.")
    ] = False,
    json: Json = False,
    registry: RegistryAddress = "",
    planner: PlannerAddress = "",
) -> None:
    """Take a tag away by compare-and-set; the artifact and the tag's history stay.

    Nobody resolves by it any more; `readyplane artifact tag NAME` still shows where it has pointed.
    Refused while the policy of the planner (given or running here) names it.
    """
    where = find("registry", registry=registry, planner=planner)
    used = run(_used(where, name))
    if used and not although_used:
        raise Refused(
            f"untag {name}",
            [f"the planner's policy names it ({used}), and would no longer find its artifact"],
            "name another first (`readyplane rollout --to REF`, `readyplane policy set "
            "manifest=REF`), move the tag (`readyplane artifact tag`), or say --although-used",
        )
    before, tag = run(_untag(where, name, expected, force=force))
    _tell_unused(where, name, used)
    if json:
        output.emit({"name": tag.name, "version": tag.version, "was": before})
        return
    was = f", which pointed at {output.short(before)}" if before else ", which pointed nowhere"
    output.say(f"took away {tag.name} (version {tag.version}){was}")


async def _used(where: Where, name: str) -> str:
    """How a policy names that tag; empty when none is known to."""
    if not where.planner:
        return ""
    try:
        async with planner_of(where) as planner:
            policy, version = await within(planner.get_policy(), POLICY_S_MAX, "the planner")
    except ReadyplaneError as error:
        _remark(f"whether the planner uses {name} is not known: {error}")
        return ""
    return f"version {version}, manifest {name}" if policy.get("manifest") == name else ""


def _tell_unused(where: Where, name: str, used: str) -> None:
    """What follows, beside the result."""
    if used:
        _remark(
            f"the planner keeps what it resolved last and is degraded until {name} points somewhere "
            "again or the policy names another; one that begins anew has nothing to start"
        )
    elif not where.planner:
        _remark(f"no planner was asked: one whose policy names {name} finds it no more")


def _remark(text: str) -> None:
    output.console(stderr=True).print(output.cell(text), soft_wrap=True)


async def _untag(where: Where, name: str, expected: str, *, force: bool) -> tuple[str, Tag]:
    async with registry_of(where) as registry:
        held = (await registry.list_tags(name))[0].digest
        if expected:
            expected = (await resolve(registry, expected)).digest
            if not held and not force:
                # The registry takes away twice what it took away once; who names a place is wrong.
                remedy = "nothing is to be done, or leave --expected out"
                raise Conflict(f"tag {name!r}", expected, "no such tag", remedy)
        elif not force:
            expected = held
        return held, await registry.remove_tag(name, expected_digest=expected, force=force)


def retire(
    reference: Reference,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for the record.")] = "",
    json: Json = False,
    registry: RegistryAddress = "",
    registry_http: RegistryHttp = "",
) -> None:
    """Hide an artifact: nobody resolves to it any more, and `gc` may take its bytes.

    Refused while a tag points at it or a worker holds it. Publishing the same bytes restores it.
    """
    where = find("registry", "registry_http", registry=registry, registry_http=registry_http)
    found = run(_retire(where, reference, reason))
    if json:
        output.emit(found)
        return
    output.say(f"{'retired' if found['retired'] else 'already retired'} {found['digest']}")


async def _retire(where: Where, reference: str, reason: str) -> dict[str, Any]:
    from urllib.parse import quote

    async with registry_of(where) as registry:
        digest = (await resolve(registry, reference)).digest
    url = f"{where.registry_http}/v1/artifacts/{digest}/retire?reason={quote(reason)}"
    return await ask_http("POST", url, where.token, what="the registry")


def gc(
    dry_run: Annotated[
        bool, switch("--dry-run", text="Say what would go; change nothing.")
    ] = False,
    json: Json = False,
    registry_http: RegistryHttp = "",
) -> None:
    """Retire artifacts that nobody needs, and take away bytes that no artifact needs.

    What a tag points at or pointed at lately, what a worker holds, reads or asked for lately, the
    newest of each model, and uploads under way stay.
    """
    where = find("registry_http", registry_http=registry_http)
    url = f"{where.registry_http}/v1/collect?dry_run={str(dry_run).lower()}"
    with output.console(stderr=True).status("collecting"):
        found = run(
            ask_http("POST", url, where.token, what="the registry", timeout_s=COLLECT_S_MAX)
        )
    if json:
        output.emit(found)
    else:
        _tell_collected(found)
    if found["failed"] and not dry_run:
        shown = [f"{f['sha256']}: {f['why']}" for f in found["failed"][:5]]
        remedy = "they stay evicting, and are tried again by the next collection"
        raise Refused("deletion of some bytes", shown, remedy)


def _tell_collected(found: dict[str, Any]) -> None:
    would = "would be " if found["dry_run"] else ""
    for digest in found["retired"]:
        output.say(f"{would}retired {digest}")
    freed = output.size(found["freed_bytes"])
    output.say(
        f"{len(found['retired'])} artifacts {would}retired, {len(found['evicted'])} blobs "
        f"({freed}) {would}taken away, {len(found['kept'])} artifacts stay"
    )
    if found["rescued"]:
        output.say(f"{len(found['rescued'])} blobs stay: somebody came to need them")
    made = output.table("artifact", "stays because", fixed=("artifact",))
    for kept in found["kept"][:KEPT_SHOWN_MAX]:
        made.add_row(output.short(kept["digest"]), output.cell(kept["why"]))
    if found["kept"]:
        output.console().print(made)
