"""Planning rules of others, one a file, each true to what its authors published.

Owns finding them: every module of this folder is a rule and has a `CONTENDER`. What several rules
share lies in the packages below it (`parts`), which are not searched.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from readyplane.core.errors import InvalidField
from readyplane_lab.proof.port import Contender


def contenders() -> Mapping[str, Contender]:
    """Every rule by its name, sorted.

    Raises:
        InvalidField: a module without a CONTENDER, or a name used twice; names the file.
    """
    return gather(__name__, list(__path__))


def gather(package: str, folders: list[str]) -> Mapping[str, Contender]:
    """The contenders of the modules in a package's folders.

    Raises:
        InvalidField: see `contenders`.
    """
    found: dict[str, Contender] = {}
    files: dict[str, str] = {}
    for info in sorted(pkgutil.iter_modules(folders), key=lambda i: i.name):
        if info.ispkg:
            continue
        file = f"{info.name}.py"
        try:
            module = importlib.import_module(f"{package}.{info.name}")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise InvalidField(file, text, "mend the file, or take it away") from error
        contender = getattr(module, "CONTENDER", None)
        if not isinstance(contender, Contender):
            remedy = "give the module a CONTENDER, a port.Contender; shared parts go into parts/"
            raise InvalidField(file, contender, remedy)
        if contender.name in found:
            remedy = f"{files[contender.name]} has that name already: use another"
            raise InvalidField(f"{file}: CONTENDER.name", contender.name, remedy)
        found[contender.name], files[contender.name] = contender, file
    return dict(sorted(found.items()))
