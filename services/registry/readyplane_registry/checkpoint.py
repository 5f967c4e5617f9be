"""A folder of model files as a hub leaves it: which files, whose revision, what its index promises.

Owns what belongs to an artifact and what is refused (pickles, foreign links, missing shards, files
of two revisions), and where the bytes came from (`Origin`). `safetensors` reads the headers;
handed to `ingest`, which hashes and publishes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from readyplane.core.canonical import control_in, nfc
from readyplane.core.errors import IdentityMismatch, InvalidField
from readyplane.core.identity import FileEntry, TensorEntry, parse
from readyplane_registry.kinds import MODEL_TOKENS_MAX, whole

PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.json",
    "chat_template.jinja",
}
JSON_BYTES_MAX = 64 * 1024 * 1024
FILES_MAX = 100_000
INDEX_SUFFIX = ".safetensors.index.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
CONTENT = re.compile(r"[0-9a-f]{64}")
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{1,6})-of-(?P<count>[0-9]{1,6})\.safetensors")
DOWNLOADS = Path(".cache", "huggingface", "download")
FAULTS_SHOWN_MAX = 5
CONFIG = "config.json"
FACTS = {
    "max_model_len": ("max_model_len", "max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
    "eos_token_id": ("eos_token_id",),
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a folder's bytes came from; told beside the artifact, never part of its identity.

    Attributes:
        repository: name at the hub, empty when the folder does not say.
        ref: the mutable name that was resolved, once (a branch or tag); empty: none was.
        commit: the revision that all files belong to; empty when the folder does not say.
    """

    repository: str = ""
    ref: str = ""
    commit: str = ""

    def fields(self) -> dict[str, str]:
        """The fields that are known."""
        told = {"repository": self.repository, "ref": self.ref, "commit": self.commit}
        return {name: value for name, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a folder.

    Attributes:
        directory: where they lie, a mutable revision resolved.
        files: relative POSIX path, in Unicode form NFC, to (file to read, size in bytes); none of
            these is a link.
        skipped: hidden files and folders that were left out.
        origin: where they came from.
        told_sha256: content that the hub promised when they were downloaded, by path.
    """

    directory: Path
    files: Mapping[str, tuple[Path, int]]
    skipped: tuple[str, ...]
    origin: Origin = field(default_factory=Origin)
    told_sha256: Mapping[str, str] = field(default_factory=dict)


def read_checkpoint(
    directory: Path, *, revision: str = "", follow_links: bool = False
) -> Checkpoint:
    """The files of a folder, of a hub's cache (`models--ORG--NAME`) at a revision, or of a snapshot.

    Args:
        follow_links: follow links that stay within the folder. A snapshot's links to contents of
            its own cache are followed anyway; what leads elsewhere is never read.

    Raises:
        InvalidField: a file or the revision is wrong; it is named.
        IdentityMismatch: the files were downloaded from two revisions (B106).
    """
    directory, origin = _resolved(directory, revision)
    snapshot = _hub_of(directory)
    files: dict[str, tuple[Path, int]] = {}
    skipped: list[str] = []
    told: dict[str, str] = {}
    written: dict[str, str] = {}
    for path in _walk(directory, skipped, follow_links=follow_links):
        relative = _name_of(path, directory, written)
        real = _real(path, directory, snapshot, follow_links=follow_links)
        facts = real.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise InvalidField(str(path), stat.filemode(facts.st_mode), "give regular files")
        if path.suffix in PICKLES:
            remedy = "loading a pickle runs code; convert it to safetensors, or move it away"
            raise InvalidField(str(path), path.suffix, remedy)
        files[relative] = (real, facts.st_size)
        if len(files) > FILES_MAX:
            raise InvalidField("directory", str(directory), f"give {FILES_MAX} files at most")
        if snapshot is not None and CONTENT.fullmatch(real.name):
            told[relative] = real.name
    if not any(name.endswith(".safetensors") for name in files):
        raise InvalidField("directory", str(directory), "give a folder with .safetensors files")
    commits = _downloads(directory, written, told)
    if len(commits) > 1:
        shown = [f"{name}: commit {commit}" for commit, name in sorted(commits.items())]
        remedy = "download all of it again at one commit"
        raise IdentityMismatch(f"files of {directory}", shown[:FAULTS_SHOWN_MAX], remedy)
    if commits and not origin.commit:
        origin = Origin(origin.repository, origin.ref, next(iter(commits)))
    if revision and revision not in {origin.ref, origin.commit}:
        known = f"the folder is of commit {origin.commit}" if origin.commit else "it names none"
        raise InvalidField("--revision", revision, f"leave it out: {known}")
    return Checkpoint(directory, files, tuple(skipped), origin, told)


def _resolved(directory: Path, revision: str) -> tuple[Path, Origin]:
    """A mutable revision becomes a commit here, once; whoever asks later gets the commit."""
    if not directory.is_dir():
        raise InvalidField("directory", str(directory), "give a folder of safetensors files")
    kind, _, name = directory.name.partition("--")
    if kind == "models" and name and (directory / "snapshots").is_dir():
        ref, commit = revision or "main", revision
        if not COMMIT.fullmatch(ref):
            if ".." in Path(ref).parts or Path(ref).is_absolute():
                raise InvalidField("--revision", ref, "name a branch, a tag or a commit")
            named = directory / "refs" / ref
            commit = named.read_text().strip() if named.is_file() else ""
        snapshot = directory / "snapshots" / commit
        if not COMMIT.fullmatch(commit) or not snapshot.is_dir():
            have = sorted(path.name for path in (directory / "snapshots").iterdir())
            remedy = f"name a revision that was downloaded; commits here: {', '.join(have[:4])}"
            raise InvalidField("--revision", ref, remedy)
        mutable = "" if ref == commit else ref
        return snapshot, Origin(name.replace("--", "/"), mutable, commit)
    if directory.parent.name == "snapshots" and COMMIT.fullmatch(directory.name):
        name = directory.parent.parent.name.removeprefix("models--")
        return directory, Origin(name.replace("--", "/"), "", directory.name)
    return directory, Origin()


def _hub_of(directory: Path) -> Path | None:
    """The folder of contents that links of a hub's snapshot point into, if this is one."""
    real = Path(os.path.realpath(directory))
    blobs = real.parent.parent / "blobs"
    if real.parent.name != "snapshots" or blobs.is_symlink() or not blobs.is_dir():
        return None
    return blobs


def _name_of(path: Path, directory: Path, written: dict[str, str]) -> str:
    """The name that an artifact has for a file: form NFC, whatever form the disk has (B111).

    Args:
        written: NFC name to the name on disk, of the files so far; this one is added.
    """
    on_disk = path.relative_to(directory).as_posix()
    try:
        on_disk.encode()
    except UnicodeEncodeError as error:
        shown = _shown(str(path))
        raise InvalidField(shown, os.fsencode(path.name), "rename it: use UTF-8") from error
    name = nfc(on_disk)
    if control := control_in(name):
        remedy = f"rename it: leave the character {control} out"
        raise InvalidField(_shown(str(path)), on_disk, remedy)
    other = written.setdefault(name, on_disk)
    if other != on_disk:
        remedy = f"rename one: {other!a} is the same name in another Unicode form"
        raise InvalidField(str(path), ascii(on_disk), remedy)
    return name


def _shown(name: str) -> str:
    """A file name as text that can be written anywhere, on one line."""
    whole = name.encode("utf-8", "backslashreplace").decode()
    return "".join(ascii(c)[1:-1] if control_in(c) else c for c in whole)


def _walk(directory: Path, skipped: list[str], *, follow_links: bool) -> list[Path]:
    """Every file; hidden ones are left out and told."""
    found: list[Path] = []
    for folder, folders, names in os.walk(directory, followlinks=follow_links):
        here = Path(folder)
        for name in sorted(folders):
            path = here / name
            if name.startswith("."):
                skipped.append(_shown(path.relative_to(directory).as_posix()) + "/")
            elif path.is_symlink():
                _check_linked_folder(path, directory, follow_links=follow_links)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if name.startswith("."):
                skipped.append(_shown((here / name).relative_to(directory).as_posix()))
            else:
                found.append(here / name)
    return found


def _check_linked_folder(path: Path, directory: Path, *, follow_links: bool) -> None:
    """A folder behind a link is walked when allowed, if it lies within and not around the link."""
    if not follow_links:
        _refuse_link(path)
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(directory)):
        _refuse_way_out(path, real)
    way = [p for p in path.parents if p.is_relative_to(directory)]
    if any(Path(os.path.realpath(p)).is_relative_to(real) for p in way):
        raise InvalidField(str(path), f"symbolic link to {real}", "it goes in circles: remove it")


def _real(path: Path, directory: Path, snapshot: Path | None, *, follow_links: bool) -> Path:
    """The file to read: links are followed within the folder when allowed, or to a hub's contents."""
    if not path.is_symlink() and not follow_links:
        return path
    real = Path(os.path.realpath(path))
    is_content = snapshot is not None and real.parent == snapshot
    if not is_content and not follow_links:
        _refuse_link(path)
    if not is_content and not real.is_relative_to(os.path.realpath(directory)):
        _refuse_way_out(path, real)
    if not real.exists() or (is_content and not real.is_file()):
        raise InvalidField(str(path), "a link to nothing", "download it again")
    return real


def _refuse_link(path: Path) -> None:
    remedy = "copy the file, or allow links that stay within the folder with --follow-links"
    raise InvalidField(str(path), "symbolic link", remedy)


def _refuse_way_out(path: Path, real: Path) -> None:
    remedy = (
        "it leads out of the folder: copy what it points at (--follow-links allows links within "
        "the folder, and of a hub's snapshot to the blobs of its own cache)"
    )
    raise InvalidField(str(path), f"symbolic link to {real}", remedy)


def _downloads(directory: Path, written: Mapping[str, str], told: dict[str, str]) -> dict[str, str]:
    """Commits that a hub's client noted beside the files it downloaded, each with one of them."""
    commits: dict[str, str] = {}
    for name, on_disk in sorted(written.items()):
        note = directory / DOWNLOADS / f"{on_disk}.metadata"
        if not note.is_file() or note.stat().st_size > 4096:
            continue
        lines = note.read_text(errors="replace").splitlines()
        if lines and COMMIT.fullmatch(lines[0]):
            commits.setdefault(lines[0], name)
        if len(lines) > 1 and CONTENT.fullmatch(lines[1]):
            told[name] = lines[1]
    return commits


def check_told(checkpoint: Checkpoint, entries: Sequence[FileEntry]) -> None:
    """Bytes are those that the hub promised under this commit (B107).

    Raises:
        IdentityMismatch: names the files that hold other bytes.
    """
    wrong = [
        f"{entry.path}: {entry.sha256}, but the hub said sha256:{told}"
        for entry in entries
        if (told := checkpoint.told_sha256.get(entry.path)) and entry.sha256 != f"sha256:{told}"
    ]
    if wrong:
        remedy = "the download was cut off or mixed; download these files again"
        raise IdentityMismatch(f"files of {checkpoint.directory}", wrong[:FAULTS_SHOWN_MAX], remedy)


def purpose_of(name: str) -> str:
    """`weights`, `tokenizer`, `config` or `other`, by the name of a file."""
    last = name.rpartition("/")[2]
    if name.endswith(".safetensors"):
        return "weights"
    if last in TOKENIZER_FILES:
        return "tokenizer"
    return "config" if last.endswith(".json") else "other"


def check_index(checkpoint: Checkpoint, tensors: Sequence[TensorEntry]) -> None:
    """Each tensor lies in one file, no shard is missing, and each index says what the files say.

    Raises:
        InvalidField: names the index, the shard or tensor, and what to do.
    """
    where: dict[str, str] = {}
    for tensor in tensors:
        other = where.setdefault(tensor.name, tensor.file)
        if other != tensor.file:
            raise InvalidField(
                f"{tensor.file}: tensor {tensor.name!r}", other, "keep each tensor in one file"
            )
    for name, (path, _size) in sorted(checkpoint.files.items()):
        if name.endswith(INDEX_SUFFIX):
            index = json_file(path, name)
            listed = _check_one_index(checkpoint, name, index, where)
            _check_total(checkpoint, name, index, [t for t in tensors if t.name in listed])
    _check_shards(list(checkpoint.files))


def _check_shards(names: Sequence[str]) -> None:
    """A shard's own name says how many there are, also where no index does."""
    found: dict[tuple[str, int], set[int]] = {}
    for shard in filter(None, map(SHARD.fullmatch, names)):
        series = shard["stem"], int(shard["count"])
        found.setdefault(series, set()).add(int(shard["number"]))
    for (stem, count), numbers in sorted(found.items()):
        first = 0 if 0 in numbers else 1
        lost = next((n for n in range(first, first + count) if n not in numbers), None)
        if lost is not None or len(numbers) != count:
            what = f"{stem}-*-of-{count:05d}.safetensors"
            told = "too many" if lost is None else f"{stem}-{lost:05d}-of-{count:05d}.safetensors"
            remedy = f"download the folder again: {what} are {count} files, {len(numbers)} are here"
            raise InvalidField(f"{what}: shard", told, remedy)


def _check_total(
    checkpoint: Checkpoint, name: str, index: Mapping[str, Any], tensors: Sequence[TensorEntry]
) -> None:
    """`metadata.total_size` is the bytes of the tensors; some tools count those of the files."""
    metadata = index.get("metadata")
    told = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(tensor.size_bytes for tensor in tensors)
    files = sum(checkpoint.files[file][1] for file in {tensor.file for tensor in tensors})
    if told is not None and (isinstance(told, bool) or told not in (held, files)):
        remedy = (
            f"its tensors are {held} bytes; download the files again, or correct the number when "
            "they were converted since"
        )
        raise InvalidField(f"{name}: metadata.total_size", told, remedy)


def _check_one_index(
    checkpoint: Checkpoint, name: str, index: Mapping[str, Any], where: Mapping[str, str]
) -> dict[str, str]:
    """Tensor to shard, as the index lists them."""
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise InvalidField(f"{name}: weight_map", listed, "map each tensor to its file")
    listed = {tensor: nfc(file) for tensor, file in listed.items()}
    folder = name.rpartition("/")[0]
    at = f"{folder}/" if folder else ""
    for shard in sorted(set(listed.values())):
        if at + shard not in checkpoint.files:
            count = sum(1 for file in listed.values() if file == shard)
            raise InvalidField(
                f"{name}: shard {shard!r}",
                "missing",
                f"download it again: {count} tensors lie in it, and it is not in the folder",
            )
    beside = {tensor for tensor, file in where.items() if file.rpartition("/")[0] == folder}
    for tensor in sorted(set(listed) | beside):
        found = where.get(tensor)
        if found is None or at + str(listed.get(tensor)) != found:
            said = "it lies in no file" if found is None else f"it lies in {found}"
            raise InvalidField(
                f"{name}: tensor {tensor!r}",
                listed.get(tensor),
                f"{said} of {checkpoint.directory.name}; download them again",
            )
    return listed


def json_file(path: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder. Raises InvalidField naming the file."""
    size = path.stat().st_size
    if size > JSON_BYTES_MAX:
        raise InvalidField(name, f"{size} bytes", f"stay below {JSON_BYTES_MAX} bytes")
    found = parse(path.read_bytes(), where=name)
    if not isinstance(found, dict):
        raise InvalidField(name, found, "hold a JSON object")
    return found


def model_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's own config.json tells that router, engine and canary need."""
    return {name: value for name, (_where, value) in _told_facts(config).items()}


def _told_facts(config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Fact to (field of config.json that tells it, value)."""
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    found: dict[str, tuple[str, Any]] = {}
    for name, sources in FACTS.items():
        for source in sources:
            told = inner if source in inner else config
            if told.get(source) is not None:
                where = f"text_config.{source}" if told is inner else source
                found[name] = where, told[source]
                break
    return found


def check_facts(config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """A model's config.json says what the registry asks of weights, before a byte is sent.

    Args:
        given: facts that were given beside it, which win; the registry judges them.

    Raises:
        InvalidField: names the field of config.json.
    """
    told = _told_facts(config)
    for name in ("max_model_len", "vocab_size"):
        where, value = told.get(name, (" or ".join(FACTS[name]), None))
        if name not in given and not whole(value, 1, MODEL_TOKENS_MAX):
            remedy = f"it needs a whole number of 1 to {MODEL_TOKENS_MAX}"
            raise InvalidField(f"{CONFIG}: {where}", value, remedy)
    where, eos = told.get("eos_token_id", ("", None))
    vocab = {**model_facts(config), **given}["vocab_size"]
    if eos is None or "eos_token_id" in given or not whole(vocab, 1, MODEL_TOKENS_MAX):
        return
    for token in eos if isinstance(eos, list) else [eos]:
        if not whole(token, 0, vocab - 1):
            remedy = f"name tokens of the vocabulary, 0 to {vocab - 1}"
            raise InvalidField(f"{CONFIG}: {where}", token, remedy)
