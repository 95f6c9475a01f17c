"""Records the code, data and environment that made a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quark_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from quark.provenance.provenance_recorder import ProvenanceRecorder
    from quark_core.sessions.session import TrainingSession


@hookimpl
def quark_register_session_methods() -> Mapping[str, str]:
    """The methods that take fingerprints."""
    return {
        "fingerprint": "quark.provenance.fingerprint_writer:fingerprint",
        "fingerprint_data": "quark.provenance.fingerprint_writer:fingerprint_data",
        "watch_data": "quark.provenance.watched_data:watch_data",
    }


@hookimpl
def quark_session_opened(session: TrainingSession) -> None:
    """Attach the recorder, in the process that leads the run."""
    # Not late: a signal handler that takes fingerprints would find it half imported.
    from quark.provenance import watched_data  # noqa: F401
    from quark.provenance.provenance_recorder import ProvenanceRecorder

    run = session.open_run
    if run.leads and run.stream.active:
        session.extensions[ProvenanceRecorder] = ProvenanceRecorder(run)


@hookimpl
def quark_describe_environment(session: TrainingSession) -> Mapping[str, Any]:
    """What the run is made of, in the thread that records its environment."""
    recorder = _find_recorder(session)
    return {} if recorder is None else recorder.describe_environment()


@hookimpl
def quark_environment_recorded(session: TrainingSession, values: Mapping[str, Any]) -> None:
    """Record the digest of the environment, the list of packages and the git diff."""
    recorder = _find_recorder(session)
    if recorder is not None:
        recorder.note_environment(values)


def _find_recorder(session: TrainingSession) -> ProvenanceRecorder | None:
    from quark.provenance.provenance_recorder import ProvenanceRecorder

    found = session.extensions.get(ProvenanceRecorder)
    return found if isinstance(found, ProvenanceRecorder) else None
