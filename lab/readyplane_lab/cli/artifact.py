"""`readyplane artifact`: models as immutable, named and verified artifacts in the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField, NotFound, Refused
from readyplane_lab.cli import artifact_progress, output
from readyplane_lab.cli.artifact_canary import with_canary
from readyplane_lab.cli.flags import Json, examples, switch
from readyplane_lab.cli.where import (
    RegistryAddress,
    RegistryHttp,
    Where,
    ask_http,
    find,
    registry_of,
    run,
)
from readyplane_lab.demo import MODEL, MODEL_MB, MODEL_TAG, demo_bytes

if TYPE_CHECKING:
    from readyplane.client import RegistryClient
    from readyplane.core.identity import Manifest
    from readyplane.core.trust import Trail
    from readyplane.kit.signing import SigningKey
    from readyplane.ports import ManifestSummary, Tag
    from readyplane_registry.ingest import Facts, Progress, Published

app = typer.Typer()
PUBLISH_EXAMPLES = examples(
    "readyplane artifact publish ./llama-8b-fp8 --model llama-8b --tag llama-8b:2026-08",
    "readyplane artifact publish ./model --model m --canary canary.json",
    "readyplane artifact publish --demo",
    "readyplane artifact publish models--org--llama --revision main --model llama --sign-key k.pem",
    "readyplane artifact publish ./model --model m --quantisation fp8 --scales tensor:F32 --json",
)
LIST_EXAMPLES = examples("readyplane artifact list", "readyplane artifact list --model demo --json")
SHOW_EXAMPLES = examples(
    "readyplane artifact show demo:latest", "readyplane artifact show sha256:… --json"
)
TAG_EXAMPLES = examples(
    "readyplane artifact tag",
    "readyplane artifact tag demo:latest",
    "readyplane artifact tag demo:stable demo:latest",
    "readyplane artifact tag demo:latest sha256:… --expected sha256:…",
)
VERIFY_EXAMPLES = examples("readyplane artifact verify demo:latest")
VERIFY_S_MAX = 3600.0
SHA, DIGEST_LENGTH, PREFIX_LENGTH_MIN = "sha256:", 71, 11
Reference = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="A digest or its beginning (sha256: and 4 digits at least), a tag, or a model name.",
    ),
]


@app.command("publish", epilog=PUBLISH_EXAMPLES)
def publish(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder of safetensors files.", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="M", help="Name that requests use (--demo: demo).")
    ] = "",
    tag: Annotated[
        str, typer.Option(metavar="T", help="Point this tag at it (--demo: demo:latest).")
    ] = "",
    demo: Annotated[
        bool, switch("--demo", text="Make and publish the deterministic demo model.")
    ] = False,
    model_mb: Annotated[
        float | None,
        typer.Option(metavar="MB", help=f"Size of its weights, to 0.07 MB (default: {MODEL_MB})."),
    ] = None,
    quantisation: Annotated[
        str,
        typer.Option(metavar="Q", help="Format of the weights (default: what config.json says)."),
    ] = "",
    scales: Annotated[
        str,
        typer.Option(
            metavar="S", help="GRANULARITY:DTYPE[:GROUP] of their scales (default: found in DIR)."
        ),
    ] = "",
    revision: Annotated[
        str,
        typer.Option(metavar="R", help="Branch, tag or commit, where DIR is a hub's cache folder."),
    ] = "",
    sign_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sign it with this private key.", show_default=False),
    ] = None,
    canary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Its known answer (`artifact canary` records one); without one nobody may serve it.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(metavar="N", help="Pipeline-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(metavar="N", help="Expert-parallel size.")] = 1,
    follow_links: Annotated[
        bool, switch("--follow-links", text="Follow links that stay within DIR.")
    ] = False,
    json: Json = False,
    registry: RegistryAddress = "",
    registry_http: RegistryHttp = "",
) -> None:
    """Publish a folder as an immutable artifact: hash, upload what is missing, then name it.

    Broken off, it leaves no name behind; the same command goes on where it ended.
    """
    if demo == (directory is not None):
        shown = str(directory) if directory else ""
        raise InvalidField("DIR", shown, "give a folder, or --demo for the demo model")
    if directory is not None and not model:
        raise InvalidField("--model", "", "name the model as requests will")
    if model_mb is not None and not demo:
        raise InvalidField("--model-mb", model_mb, "give it with --demo, only then")
    size_bytes = demo_bytes(MODEL_MB if model_mb is None else model_mb)
    if canary is not None and demo:
        raise InvalidField("--canary", str(canary), "leave it out: the demo model has its own")
    for name, value in (("tp", tp), ("pp", pp), ("ep", ep)):
        if value < 1:
            raise InvalidField(f"--{name}", value, "give 1 or more")
    if demo:
        _refuse_with_demo(
            {
                "--quantisation": quantisation,
                "--scales": scales,
                "--revision": revision,
                "--follow-links": follow_links,
            }
        )
    from readyplane.kit.signing import SigningKey
    from readyplane_registry.ingest import Facts

    signer = None if sign_key is None else SigningKey.read(sign_key)
    where = find("registry", "registry_http", registry=registry, registry_http=registry_http)
    if directory is None:
        facts = Facts(tp=tp, pp=pp, ep=ep)
        published = _publish_demo(where, model, tag, size_bytes, facts, signer=signer)
    else:
        from readyplane_registry.quantised import scales_from_text

        told = scales_from_text(scales) if scales else None
        facts = Facts(quantisation=quantisation, scales=told, tp=tp, pp=pp, ep=ep)
        if canary is not None:
            facts = with_canary(facts, canary)
        published = _publish(
            where,
            directory,
            model,
            tag,
            facts,
            signer=signer,
            revision=revision,
            follow_links=follow_links,
        )
    _tell_published(published, as_json=json)


def _refuse_with_demo(given: Mapping[str, str | bool]) -> None:
    """What tells of a folder's files says nothing of a model that is made here."""
    for name, value in given.items():
        if value:
            raise InvalidField(name, value, "leave it out with --demo: the demo model is made here")


def _publish_demo(
    where: Where,
    model: str,
    tag: str,
    size_bytes: int,
    facts: Facts,
    *,
    signer: SigningKey | None,
) -> Published:
    """Made in a temporary folder: equal arguments give equal bytes, so nothing need be kept."""
    import tempfile

    from readyplane_lab.up.demo_model import make_demo_model

    name = model or MODEL
    with tempfile.TemporaryDirectory(prefix="readyplane-demo-model-") as folder:
        with output.console(stderr=True).status("making the demo model"):
            made = make_demo_model(Path(folder), size_bytes=size_bytes)
        facts = replace(facts, config=made.config, canary=made.canary)
        default = MODEL_TAG if name == MODEL else ""
        return _publish(where, made.folder, name, tag or default, facts, signer=signer)


def _publish(
    where: Where,
    directory: Path,
    model: str,
    tag: str,
    facts: Facts,
    *,
    signer: SigningKey | None,
    revision: str = "",
    follow_links: bool = False,
) -> Published:
    from readyplane_registry.ingest import RemoteBlobs, publish_directory

    async def work(progress: Callable[[Progress], None]) -> Published:
        async with registry_of(where) as registry:
            return await publish_directory(
                directory,
                model=model,
                registry=registry,
                sink=RemoteBlobs(where.registry_http, token=where.token),
                facts=facts,
                tag=tag,
                revision=revision,
                signer=signer,
                follow_links=follow_links,
                progress=progress,
            )

    with artifact_progress.shown() as progress:
        return run(work(progress))


def _tell_published(published: Published, *, as_json: bool) -> None:
    manifest = published.manifest
    document = {
        "digest": published.digest,
        "created": published.created,
        "model": manifest.model,
        "size_bytes": manifest.size_bytes,
        "uploaded_bytes": published.uploaded_bytes,
        "tag": None if published.tag is None else asdict(published.tag),
        "skipped": list(published.skipped),
        "origin": published.origin.fields(),
        "signed_by": published.signed_by,
        "canary": manifest.canary is not None,
    }
    if manifest.canary is None:
        from readyplane.core.identity import CANARY_REMEDY

        output.console(stderr=True).print(
            "[yellow]warning[/yellow]: it has no known answer: no worker of it is ever admitted, and "
            f"`rollout --to` refuses it; {CANARY_REMEDY}",
            soft_wrap=True,
        )
    if as_json:
        output.emit(document)
        return
    what = "published" if published.created else "already published"
    output.say(f"{what} {published.digest}")
    output.say(
        f"{manifest.model}: {len(manifest.files)} files, {len(manifest.tensors)} tensors, "
        f"{output.size(manifest.size_bytes)} ({output.size(published.uploaded_bytes)} sent)"
    )
    if published.origin.fields():
        output.say(f"from {_pairs(published.origin.fields())}")
    if published.signed_by:
        output.say(f"signed by {published.signed_by}")
    if published.tag is not None:
        output.say(f"tag {published.tag.name} (version {published.tag.version}) points at it")
    if published.skipped:
        output.say(f"left out (hidden): {', '.join(published.skipped)}")


@app.command("list", epilog=LIST_EXAMPLES)
def list_(
    model: Annotated[str, typer.Option(metavar="M", help="Only of this model.")] = "",
    kind: Annotated[
        str, typer.Option(metavar="K", help="Only weights, compile, engine or kv_profile.")
    ] = "",
    json: Json = False,
    registry: RegistryAddress = "",
) -> None:
    """List artifacts, newest first, with the tags that point at them."""
    where = find("registry", registry=registry)
    found = run(_list(where, model, kind))
    if json:
        rows = [{**asdict(summary), "tags": list(summary.tags)} for summary in found]
        output.emit({"artifacts": rows})
        return
    made = output.table(
        "artifact",
        "kind",
        "model",
        "size",
        "files",
        "tensors",
        "published",
        "tags",
        right=("size", "files", "tensors"),
        fixed=("artifact", "published"),
    )
    for summary in found:
        made.add_row(
            output.short(summary.digest),
            output.cell(summary.kind),
            output.cell(summary.model),
            output.size(summary.size_bytes),
            str(summary.file_count),
            str(summary.tensor_count),
            output.moment(summary.created_s),
            output.cell(", ".join(summary.tags)) or output.NOT_KNOWN,
        )
    none = f"none of kind {kind!r}" if kind else "none yet"
    made.caption = None if found else f"{none}; `readyplane artifact publish DIR --model M`"
    output.console().print(made)


async def _list(where: Where, model: str, kind: str) -> list[ManifestSummary]:
    async with registry_of(where) as registry:
        found = await registry.list_manifests(model=model, kind=kind)
        if model and not found:  # unknown is not empty
            published = {summary.model for summary in await registry.list_manifests()}
            if model not in published:
                told = f"published are {', '.join(sorted(published))}" if published else "none is"
                raise NotFound("model", model, told)
        return found


@app.command("show", epilog=SHOW_EXAMPLES)
def show(
    reference: Reference,
    json: Json = False,
    registry: RegistryAddress = "",
    registry_http: RegistryHttp = "",
) -> None:
    """Show one artifact: identity, facts and files (--json: the whole manifest)."""
    where = find("registry", registry=registry, registry_http=registry_http)
    manifest, trail = run(_shown(where, reference))
    if json:
        output.emit(
            {
                "digest": manifest.digest,
                "size_bytes": manifest.size_bytes,
                "manifest": manifest.document(),
                "retired": trail.retired,
                "origin": dict(trail.origin),
                "signatures": [
                    {"key_id": s.key_id, "envelope": s.envelope, "created_s": s.created_s}
                    for s in trail.signatures
                ],
            }
        )
        return
    document = manifest.document()
    screen = output.console()
    screen.print(f"[bold]{manifest.digest}[/bold]")
    facts: Mapping[str, object] = {
        "kind": manifest.kind,
        "model": manifest.model,
        "size": f"{output.size(manifest.size_bytes)}, {len(manifest.tensors)} tensors",
        **{k: document[k] for k in ("quantisation", "layout", "loader_version")},
        "parallel": _pairs(document["parallel"]),
        "config": _pairs(document.get("config") or {}),
        "canary": "recorded" if manifest.canary is not None else "none",
        "origin": _pairs(trail.origin),
        "signed by": ", ".join(s.key_id for s in trail.signatures) or "nobody",
        **({"state": "retired: nobody resolves to it"} if trail.retired else {}),
    }
    for name, value in facts.items():
        screen.print(f"{name:<15}{output.cell(str(value))}")
    made = output.table("file", "purpose", "size", "sha256", right=("size",), fixed=("sha256",))
    for entry in manifest.files:
        made.add_row(
            output.cell(entry.path),
            output.cell(entry.purpose),
            output.size(entry.size_bytes),
            output.short(entry.sha256),
        )
    screen.print(made)


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or output.NOT_KNOWN


async def _shown(where: Where, reference: str) -> tuple[Manifest, Trail]:
    async with registry_of(where) as registry:
        manifest = await resolve(registry, reference)
        return manifest, await registry.trail(manifest.digest)


async def _resolve(where: Where, reference: str) -> Manifest:
    async with registry_of(where) as registry:
        return await resolve(registry, reference)


async def resolve(registry: RegistryClient, reference: str) -> Manifest:
    """By digest, the unique beginning of one, tag or model name.

    Raises:
        NotFound: nothing has that name. InvalidField: several digests begin so.
    """
    if not reference.startswith(SHA):
        # By its tag also what nobody trusted has signed yet: it is to be looked at, and signed.
        tagged = [t.digest for t in await registry.list_tags() if t.name == reference]
        if tagged:
            return await registry.get_manifest(tagged[0])
        return await registry.resolve(reference)
    if len(reference) >= DIGEST_LENGTH:
        return await registry.get_manifest(reference)
    digits = reference.removeprefix(SHA)
    if len(reference) < PREFIX_LENGTH_MIN or set(digits) - set(hexdigits.lower()):
        least = PREFIX_LENGTH_MIN - len(SHA)
        remedy = f"write {SHA} and at least {least} lower-case hex digits of it, or all 64"
        raise InvalidField("REF", reference, remedy)
    known = [s.digest for s in await registry.list_manifests()]
    found = [digest for digest in known if digest.startswith(reference)]
    if not found:
        raise NotFound("artifact", reference, "`readyplane artifact list` shows the known ones")
    if len(found) > 1:
        raise InvalidField("REF", reference, f"write more of it: {', '.join(found[:4])}")
    return await registry.get_manifest(found[0])


@app.command("tag", epilog=TAG_EXAMPLES)
def tag(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The tag; alone: its history.", show_default=False)
    ] = "",
    reference: Annotated[
        str,
        typer.Argument(metavar="REF", help="What it is to point at.", show_default=False),
    ] = "",
    expected: Annotated[
        str,
        typer.Option(metavar="DIGEST", help="Where it must point now (default: where it does)."),
    ] = "",
    force: Annotated[bool, switch("--force", text="Move it from wherever it is.")] = False,
    json: Json = False,
    registry: RegistryAddress = "",
) -> None:
    """Point a tag at an artifact by compare-and-set; without REF show where tags point.

    If somebody else moves the tag at the same time, this one fails and nothing is lost.
    """
    if not reference and (force or expected):
        raise InvalidField("REF", "", "name what the tag is to point at")
    where = find("registry", registry=registry)
    found = run(_tag(where, name, reference, expected, force=force))
    if json:
        output.emit(asdict(found[0]) if reference else {"tags": [asdict(t) for t in found]})
        return
    made = output.table(
        "tag", "version", "artifact", "since", right=("version",), fixed=("artifact",)
    )
    for each in found:
        digest = output.short(each.digest) if each.digest else "taken away"
        made.add_row(
            output.cell(each.name), str(each.version), digest, output.moment(each.created_s)
        )
    output.console().print(made)


async def _tag(where: Where, name: str, reference: str, expected: str, *, force: bool) -> list[Tag]:
    async with registry_of(where) as registry:
        if not reference:
            return await registry.list_tags(name)
        digest = (await resolve(registry, reference)).digest
        if expected:
            expected = (await resolve(registry, expected)).digest
        elif not force:
            now = [t.digest for t in await registry.list_tags() if t.name == name]
            expected = now[0] if now else ""
        return [await registry.set_tag(name, digest, expected_digest=expected, force=force)]


@app.command("verify", epilog=VERIFY_EXAMPLES)
def verify(
    reference: Reference,
    json: Json = False,
    registry: RegistryAddress = "",
    registry_http: RegistryHttp = "",
) -> None:
    """Read every stored byte of an artifact again and compare it with the manifest."""
    where = find("registry", "registry_http", registry=registry, registry_http=registry_http)
    with output.console(stderr=True).status("reading every byte"):
        found = run(_verify(where, reference))
    if json:
        output.emit(found)
    else:
        made = output.table("file", "size", "state", right=("size",))
        for file in found["files"]:
            wrong = file["problem"]
            state = f"[red]{output.cell(wrong)}[/red]" if wrong else "[green]ok[/green]"
            made.add_row(output.cell(file["path"]), output.size(file["size_bytes"]), state)
        output.console().print(made)
    if not found["ok"]:
        raise Refused(
            f"artifact {output.short(found['digest'])}",
            [f"{f['path']}: {f['problem']}" for f in found["files"] if f["problem"]][:5],
            "publish it again from an intact folder",
        )


async def _verify(where: Where, reference: str) -> dict[str, Any]:
    digest = (await _resolve(where, reference)).digest
    url = f"{where.registry_http}/v1/artifacts/{digest}/verify"
    return await ask_http("POST", url, where.token, what="the registry", timeout_s=VERIFY_S_MAX)
