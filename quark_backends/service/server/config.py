"""How a server is set up: where it listens, where it keeps things, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ANY_SCOPE", "DEFAULT_STORE_URL", "Limits", "Principal", "Scope", "ServiceConfig"]

Scope = str
"""read, ingest or admin; admin implies the others."""

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
        concurrent_requests: Requests that one process works on at once.
        memory_bytes: What the bodies of requests in one process may take together,
            decompressed; more of them wait.
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
        allowed_hosts: Names that a request's Host may have; empty allows any.
        key_cache_s: How long a key that was looked up is believed in: a revoked one
            stops within that time.
        shutdown_s: How long a server that is told to end finishes what it has accepted.
        drain_s: How long before that it says that it is not ready, and serves on.
        access_log: Whether every request is logged.
        open_stores: Workspaces whose stores one process holds open.
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
