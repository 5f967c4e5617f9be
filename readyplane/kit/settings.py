"""Where things are: fixed at start, from flags, then `READYPLANE_…` variables, then defaults.

Owns the settings every service has and the way a class of settings becomes a command line.
Policy (what is wanted, hot and recorded) is none of this.
"""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from readyplane.core.errors import InvalidField, UnknownField

S = TypeVar("S", bound="ServiceSettings")
ENV_PREFIX = "READYPLANE_"


class ServiceSettings(BaseSettings):
    """What every service is told. Services subclass and add their own."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="address to listen on")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="gRPC port, 0 for a free one")
    http_port: int = Field(default=0, ge=0, le=65535, description="HTTP port, 0 for a free one")
    database_url: str = Field(
        default="", description="postgresql://user:password@host:port/database"
    )
    redis_url: str = Field(default="", description="redis://host:port/0")
    registry: str = Field(default="", description="gRPC address of the registry, host:port")
    router: str = Field(
        default="",
        description="gRPC address of the router, host:port; of several, all, with commas between",
    )
    planner: str = Field(default="", description="gRPC address of the planner, host:port")
    actuator: str = Field(default="", description="gRPC address of the actuator, host:port")
    token: str = Field(
        default="", repr=False, description="shared token; better given as a variable"
    )
    otlp_endpoint: str = Field(
        default="", description="OTLP/gRPC endpoint for traces, empty for none"
    )
    log_level: str = Field(default="info", description="debug, info, warning or error")
    ready_file: Path | None = Field(default=None, description="written with pid and ports when up")
    data_dir: Path | None = Field(default=None, description="folder for what must survive")

    @field_validator("registry", "router", "planner", "actuator")
    @classmethod
    def _address(cls, value: str) -> str:
        for part in value.split(",") if value else ():
            host, _, port = part.strip().rpartition(":")
            if not host or not port.isdigit() or "://" in part:
                message = "write host:port, without http://; several are separated by commas"
                raise ValueError(message)
        return value

    @field_validator("log_level")
    @classmethod
    def _level(cls, value: str) -> str:
        if value.lower() not in {"debug", "info", "warning", "error"}:
            message = "write debug, info, warning or error"
            raise ValueError(message)
        return value.lower()

    def need(self, *names: str) -> None:
        """Check that these settings are given.

        Raises:
            InvalidField: names the first that is empty, with its flag and variable.
        """
        for name in names:
            if not getattr(self, name):
                remedy = f"give {_flag(name)} or {ENV_PREFIX}{name.upper()}"
                raise InvalidField(name, getattr(self, name), remedy)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidField("command line", message, f"see {self.prog} --help", message)


def parse_settings(cls: type[S], argv: Sequence[str], prog: str, description: str) -> S:
    """Settings from a command line: every field is a `--kebab-case` flag; `--help` lists them.

    A list is given by repeating its flag, a boolean as `--x` or `--no-x`.

    Raises:
        UnknownField: a flag that does not exist (the nearest one is named).
        InvalidField: a value that does not fit, from a flag or a variable.
        SystemExit: after `--help`.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    for name, info in cls.model_fields.items():
        _add_flag(parser, name, info)
    given, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise _unknown(unknown[0], [_flag(name) for name in cls.model_fields], prog)
    values = {name: value for name, value in vars(given).items() if value is not None}
    try:
        return cls(**values)
    except SettingsError as error:
        raise InvalidField("environment", str(error), "write lists as JSON") from error
    except ValidationError as error:
        raise _invalid(error) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_flag(parser: argparse.ArgumentParser, name: str, info: FieldInfo) -> None:
    text = (info.description or "").replace("%", "%%")
    default = info.get_default(call_default_factory=True) if not info.is_required() else "needed"
    shown = f"{text} [{ENV_PREFIX}{name.upper()}; {default!s}]".replace("%%", "%").replace(
        "%", "%%"
    )
    kind = _kind(info.annotation)
    if kind is bool:
        parser.add_argument(
            _flag(name), help=shown, default=None, action=argparse.BooleanOptionalAction
        )
    elif kind in {list, tuple, set, frozenset}:
        parser.add_argument(_flag(name), help=shown, default=None, action="append")
    else:
        parser.add_argument(_flag(name), help=shown, default=None, metavar=name.upper())


def _kind(annotation: Any) -> Any:
    """`bool`, a collection type, or whatever else stands in an annotation, `| None` left out."""
    origin = typing.get_origin(annotation)
    if origin in {typing.Union, types.UnionType}:
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _kind(inner[0]) if len(inner) == 1 else str
    return origin or annotation


def _unknown(given: str, known: Sequence[str], prog: str) -> InvalidField:
    flag = given.partition("=")[0]
    near = difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UnknownField("command line", flag, f"{hint}`{prog} --help` lists every flag")


def _invalid(error: ValidationError) -> InvalidField:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"]) or "settings"
    top = str(first["loc"][0]) if first["loc"] else "settings"
    message = first["msg"].removeprefix("Value error, ")
    value = "***" if top == "token" else first.get("input")
    return InvalidField(name, value, f"{message} ({_flag(top)} or {ENV_PREFIX}{top.upper()})")
