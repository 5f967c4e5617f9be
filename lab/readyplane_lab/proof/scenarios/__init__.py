"""The workloads that every contender is judged on, one file each.

Owns finding them: a new file beside this one that has a `SCENARIO` (or a tuple `SCENARIOS`) is all
that a new scenario needs.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module

from readyplane.core.errors import InvalidField
from readyplane_lab.proof.port import Scenario


def scenarios() -> Mapping[str, Scenario]:
    """All scenarios by name, in the order of their names.

    Raises:
        InvalidField: a file without a scenario, or a name given twice; names the file.
    """
    return _found(tuple(__path__), __name__)


@cache
def _found(folders: tuple[str, ...], package: str) -> Mapping[str, Scenario]:
    found: dict[str, Scenario] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(folders)):
        where = f"scenarios/{module}.py"
        try:
            loaded = import_module(f"{package}.{module}")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise InvalidField(where, text, "mend the file, or take it away") from error
        for scenario in scenarios_of(loaded, where):
            if scenario.name in found:
                raise InvalidField(where, scenario.name, "choose a name that no other file has")
            found[scenario.name] = scenario
    return dict(sorted(found.items()))


def scenarios_of(module: object, where: str) -> Iterable[Scenario]:
    """What a file has to offer.

    Raises:
        InvalidField: nothing, or something else than scenarios.
    """
    one, many = getattr(module, "SCENARIO", None), getattr(module, "SCENARIOS", ())
    offered = [*([one] if one is not None else []), *many]
    if not offered or not all(isinstance(s, Scenario) for s in offered):
        raise InvalidField(
            where, offered, "define SCENARIO = Scenario(...), or a tuple SCENARIOS of them"
        )
    return offered
