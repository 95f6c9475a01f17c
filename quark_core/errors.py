"""Every error that Quark raises on purpose.

QuarkError
├── SchemaValidationError     (ValueError) fix the record or the argument
├── SchemaMigrationError      the store cannot be migrated safely
├── SessionStoreError         the primary store cannot serve the call
│   ├── RunNotFoundError      no such run in this store
│   ├── InvalidRunStateError  the run's state does not allow this call
│   ├── ArtifactNotFoundError no such artifact, or its payload is not there
│   └── ArtifactDamagedError  a payload is not what was stored
├── RetentionHookError        a retention hook raised
├── TrainingHalted            a monitor stops the training; .alert says why
└── BackendError              .backend says which one
    ├── BackendUnavailable    retry later
    │   └── BackendUnauthorized   the credentials are refused; retry much later
    ├── BackendRejected       never retry this batch
    ├── BackendContractError  a bug in the plugin
    └── UnknownBackendError   (ValueError) nothing installed answers to that name
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quark_core.analysis_records import AlertRecord

__all__ = [
    "ArtifactDamagedError",
    "ArtifactNotFoundError",
    "BackendContractError",
    "BackendError",
    "BackendRejected",
    "BackendUnauthorized",
    "BackendUnavailable",
    "InvalidRunStateError",
    "QuarkError",
    "RetentionHookError",
    "RunNotFoundError",
    "SchemaMigrationError",
    "SchemaValidationError",
    "SessionStoreError",
    "TrainingHalted",
    "UnknownBackendError",
]


class QuarkError(Exception):
    """Root of every error that Quark raises on purpose."""


class SchemaValidationError(QuarkError, ValueError):
    """A record, a snapshot or an argument does not fit the current schema.

    The message begins with the name of the argument or field at fault.
    """


class SchemaMigrationError(QuarkError):
    """A local store cannot be migrated safely; it was left as it was."""


class SessionStoreError(QuarkError):
    """The primary store cannot serve the call now.

    Nothing that a writer has accepted is lost by this error: it stays queued
    and is delivered when the store answers again.
    """


class RunNotFoundError(SessionStoreError):
    """The store has no run of that id."""


class InvalidRunStateError(SessionStoreError):
    """The state of the run, the session or the writer forbids the call."""


class ArtifactNotFoundError(SessionStoreError):
    """The run has no such artifact, or its payload is not kept; the message says why."""


class ArtifactDamagedError(SessionStoreError):
    """A payload no longer has the hash that it was stored with."""


class RetentionHookError(QuarkError):
    """A retention hook of an ArtifactStore raised; the artifact itself is stored."""


class TrainingHalted(QuarkError):
    """A monitor that was told to (`halt_on`) stops the training, at a call that logs.

    What that call was to log is not accepted; the run takes records again.

    Attributes:
        alert: Why.
    """

    def __init__(self, message: str, alert: AlertRecord) -> None:
        super().__init__(message)
        self.alert = alert

    def __reduce__(self) -> tuple[type[TrainingHalted], tuple[str, AlertRecord]]:
        # By its message alone it could not be made again in the process that it is sent to.
        return type(self), (str(self), self.alert)


class BackendError(QuarkError):
    """What a storage backend raises, or what is wrong with one.

    Attributes:
        backend: Name of the backend, or None where the raiser does not know
            it; the lane fills it in.
    """

    def __init__(self, message: str, *, backend: str | None = None) -> None:
        super().__init__(message)
        self.backend = backend


class BackendUnavailable(BackendError):
    """The backend cannot take this batch now; the lane tries again, for ever.

    Attributes:
        retry_after_s: The backend asks not to be called sooner; None where it
            does not say.
    """

    def __init__(
        self, message: str, *, backend: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, backend=backend)
        self.retry_after_s = retry_after_s


class BackendUnauthorized(BackendUnavailable):
    """The backend refuses our credentials; the lane pauses and asks again every few minutes."""


class BackendRejected(BackendError):
    """The backend will never take this batch; the lane puts it in quarantine."""


class BackendContractError(BackendError):
    """A plugin breaks its contract, such as a declared capability that is absent."""


class UnknownBackendError(BackendError, ValueError):
    """No installed backend has the name or the URI scheme that was asked for."""
