"""Configuration of a server: by options, then environment, then file, then defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from quark_core.errors import SchemaValidationError

Scope = str
"""read, ingest, write or admin; admin implies the others."""

ANY_SCOPE: Scope = "any"
"""What a route asks for that every valid key may call."""


DEFAULT_STORE_URL = "sqlite:///quark-service/service.db"
"""Where a server keeps everything that was told nothing: a folder in the working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request or run may take.

    Attributes:
        body_bytes: Body of a request as it comes over the wire, artifacts aside.
        decoded_bytes: The same once it is decompressed, and the bodies of its batches together.
        batch_rows: Records of one batch.
        key_bytes: Name of a metric, and any other text that identifies something.
        keys_per_run: Different metrics of a run.
        artifact_bytes: Payload of one artifact.
        body_timeout_s: How long a body may take to arrive; of a payload, how long
            nothing of it may arrive.
        nesting: How deep JSON may be nested.
        requests_per_s: Of one key, on average; a burst may have ten times as many at once.
        rows_per_s: Records that one key may send per second, likewise.
        json_rows: Rows of one read as JSON.
        page_runs: Runs of one page of a list.
        concurrent_requests: Requests that one process works on at once. A workspace may
            have three quarters of what others leave.
        bodies_per_key: Bodies of one key's requests that arrive at one process at once.
        memory_bytes: What the bodies of requests in one process may take together: half
            of it while they arrive, half decompressed, and one workspace half of either;
            more of them wait.
        reader_stall_s: How long a reader may take nothing of a reply.
        reader_total_s: How long the rows of one reply may take.
    """

    body_bytes: int = 32 * 2**20
    decoded_bytes: int = 128 * 2**20
    batch_rows: int = 65_536
    key_bytes: int = 512
    keys_per_run: int = 10_000
    artifact_bytes: int = 50 * 10**9
    body_timeout_s: float = 30.0
    nesting: int = 64
    requests_per_s: float = 500.0
    rows_per_s: float = 5_000_000.0
    json_rows: int = 10_000
    page_runs: int = 500
    concurrent_requests: int = 512
    bodies_per_key: int = 256
    memory_bytes: int = 512 * 2**20
    reader_stall_s: float = 30.0
    reader_total_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """One server.

    Attributes:
        store_url: `sqlite:///path` or `postgresql+psycopg://…`, as SQLAlchemy writes it.
        artifact_url: A folder, as a path or a `file://` URL; beside the store by default.
        host, port: Where it listens; 0 takes a free port.
        workers: Processes.
        allowed_hosts: Names that a request's Host may have, besides this machine's own
            for itself and what it was reached at; `*` allows any.
        key_cache_s: How long a key that was looked up is believed in: a revoked one
            stops within that time.
        shutdown_s: How long a server that is told to end finishes what it has accepted.
        drain_s: How long before that it says that it is not ready, and serves on.
        access_log: Whether every request is logged.
        open_stores: Workspaces whose stores one process holds open.
        ui: Whether the page is served beside the API.
        allow_edit: Whether the page lets keys with the scope write change runs.
        keep_sources: Whether trainings are told to keep the text of their code here, and not
            its hashes alone.
        notify: Who is told of runs: URLs, each of them for all workspaces, or for one as
            `WORKSPACE=URL`. They are secrets.
        notify_on: What is told, as `quark.monitor` takes it.
        limits: See there.
    """

    store_url: str = DEFAULT_STORE_URL
    artifact_url: str = ""
    host: str = "127.0.0.1"
    port: int = 7411
    workers: int = 1
    allowed_hosts: tuple[str, ...] = ()
    key_cache_s: float = 30.0
    shutdown_s: float = 20.0
    drain_s: float = 0.0
    access_log: bool = False
    open_stores: int = 64
    ui: bool = False
    allow_edit: bool = False
    keep_sources: bool = False
    notify: tuple[str, ...] = field(default=(), repr=False)
    notify_on: str = ""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request.

    Attributes:
        workspace: Name of the workspace that the key belongs to: all that it can reach.
        key_id: The key, without its secret.
        scopes: What it may do.
    """

    workspace: str
    key_id: str
    scopes: frozenset[Scope]


PREFIX = "QUARK_SERVE_"
"""Every setting is an environment variable too: QUARK_SERVE_PORT, QUARK_SERVE_LIMITS_BODY_BYTES."""

_LIMITS = "limits"
# What users call the two places.
_NAMES = {"store_url": "store", "artifact_url": "artifacts"}


def load_config(
    options: Mapping[str, Any], environ: Mapping[str, str], path: Path | None = None
) -> ServiceConfig:
    """The configuration of a server.

    Args:
        options: Setting -> value, of the command line; None where it was not given.
        environ: The environment.
        path: A TOML file, with the settings at the top and a table `limits`.

    Raises:
        SchemaValidationError: A setting that is unknown or does not fit; the message
            names it and where it stands.
    """
    given: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if path is not None:
        _take_file(path, given, limits)
    hints, limit_hints = get_type_hints(ServiceConfig), get_type_hints(Limits)
    for each in fields(ServiceConfig):
        if each.name == _LIMITS:
            continue
        name = _NAMES.get(each.name, each.name)
        variable = f"{PREFIX}{name.upper()}"
        if (text := environ.get(variable)) is not None:
            value: Any = text
            if each.name == "allowed_hosts":
                value = [part.strip() for part in text.split(",") if part.strip()]
            elif each.name == "notify":
                value = text.split()  # there are commas in such URLs
            given[each.name] = _convert(value, hints[each.name], variable)
        option = options.get(name)
        # An option that may be given several times is an empty list where it was not.
        if option is not None and option != ():
            given[each.name] = _convert(option, hints[each.name], f"--{name.replace('_', '-')}")
    for each in fields(Limits):
        variable = f"{PREFIX}LIMITS_{each.name.upper()}"
        if (text := environ.get(variable)) is not None:
            limits[each.name] = _convert(text, limit_hints[each.name], variable)
    if not given.get("store_url"):
        given.pop("store_url", None)
    config = ServiceConfig(**given, limits=Limits(**limits))
    _check(config)
    return config


def _take_file(path: Path, given: dict[str, Any], limits: dict[str, Any]) -> None:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SchemaValidationError(f"config {path} cannot be read: {error}") from error
    hints, limit_hints = get_type_hints(ServiceConfig), get_type_hints(Limits)
    names = {_NAMES.get(name, name): name for name in hints}
    for name, value in document.items():
        if name == _LIMITS and isinstance(value, dict):
            for limit, bound in value.items():
                if limit not in limit_hints:
                    raise _unknown(path, f"limits.{limit}", limit_hints)
                limits[limit] = _convert(bound, limit_hints[limit], f"{path}: limits.{limit}")
        elif name in names and name != _LIMITS:
            given[names[name]] = _convert(value, hints[names[name]], f"{path}: {name}")
        else:
            raise _unknown(path, name, names)


def _check(config: ServiceConfig) -> None:
    for name, low, high in (("port", 0, 65_535), ("workers", 1, 256), ("open_stores", 1, 100_000)):
        value = getattr(config, name)
        if not low <= value <= high:
            raise SchemaValidationError(f"{name} must be from {low} to {high}, got {value}")
    for each in fields(Limits):
        if getattr(config.limits, each.name) <= 0:
            raise SchemaValidationError(f"limits.{each.name} must be above 0")
    for name in ("key_cache_s", "shutdown_s", "drain_s"):
        if getattr(config, name) < 0:
            raise SchemaValidationError(f"{name} must not be negative")


def _convert(value: Any, hint: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        raise SchemaValidationError(f"{where}: {error}") from None


def _unknown(path: Path, name: str, known: Mapping[str, Any]) -> SchemaValidationError:
    return SchemaValidationError(
        f"config {path}: unknown option {name!r:.80}. The options are {', '.join(sorted(known))}"
    )
