"""How a server is set up: where it listens, where it keeps things, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Limits", "Principal", "Scope", "ServiceConfig"]

Scope = str
"""read, ingest or admin; admin implies the others."""


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
        concurrent_requests: Requests that one process works on at once.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """One server.

    Attributes:
        store_url: `sqlite:///path` or `postgresql+psycopg://…`, as SQLAlchemy writes it.
        artifact_url: A folder, as a path or a `file://` URL; beside the store by default.
        host, port: Where it listens; 0 takes a free port.
        workers: Processes.
        allowed_hosts: Names that a request's Host may have; empty allows any.
        limits: See there.
    """

    store_url: str
    artifact_url: str = ""
    host: str = "127.0.0.1"
    port: int = 7411
    workers: int = 1
    allowed_hosts: tuple[str, ...] = ()
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
