"""Declares the backend.

Quark imports this module whenever it looks for backends, in every program
that uses it. So nothing heavy is imported here, and nothing is opened.
"""

from __future__ import annotations

from quark_core.api import Backend, BackendConfig, BackendDefinition, Capability
from quark_core.hookspecs import hookimpl

__all__ = ["quark_register_backends"]


def open_jsonl(config: BackendConfig) -> Backend:
    """Open the backend for one run, on its lane's thread."""
    from quark_jsonl.backend import JsonLinesBackend

    return JsonLinesBackend(config)


@hookimpl
def quark_register_backends() -> list[BackendDefinition]:
    """The backend `jsonl`."""
    return [
        BackendDefinition(
            name="jsonl",
            summary="JSON lines, in the run's folder, in jsonl:DIR or at jsonl+URL of fsspec",
            open=open_jsonl,
            capabilities=frozenset({Capability.READ, Capability.IDEMPOTENT}),
        )
    ]
