"""Every error that Quark raises on purpose.

QuarkError
├── SchemaValidationError     (ValueError) fix the record or the argument
│   └── UnknownKindError      (KeyError) a plugin that defines records is not installed there
├── SchemaMigrationError      the store cannot be migrated safely
├── SessionStoreError         the primary store cannot serve the call
│   ├── StoreUnavailableError     it is out of reach, and may be back at any time
│   │   └── StoreUnauthorizedError    it refuses our credentials
│   ├── StoreNotFoundError    there is no store at the place that was named
│   ├── RunNotFoundError      no such run in this store
│   ├── InvalidRunStateError  the run's state does not allow this call
│   ├── ArtifactNotFoundError no such artifact, or its payload is not there
│   └── ArtifactDamagedError  a payload is not what was stored
├── RetentionHookError        a retention hook raised
├── TrainingHalted            a monitor stops the training; .alert says why
├── MissingLibraryError       (ImportError) an extra is not installed
├── StopRequested             somebody has asked the run to stop; .request says who and why
└── BackendError              .backend says which one
    ├── BackendUnavailable    retry later
    │   ├── BackendUnusable       a person must give it something; retry much later
    │   │   └── BackendUnauthorized   the credentials are refused
    │   └── BackendOutcomeUnknown it may have the batch, and nobody can tell
    ├── BackendRejected       never retry this batch
    ├── BackendContractError  a bug in the plugin
    └── UnknownBackendError   (ValueError) nothing installed answers to that name
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

_WAIT = "; the records wait"


class QuarkError(Exception):
    """Base class of the errors that Quark raises."""


class SchemaValidationError(QuarkError, ValueError):
    """Error for an invalid argument or record.

    The message starts with the name of the argument or field.
    """


class UnknownKindError(SchemaValidationError, KeyError):
    """A kind of record whose type is not known: here, or on the server that is asked."""

    # A KeyError shows what it was made with as Python would write it.
    __str__ = Exception.__str__


class SchemaMigrationError(QuarkError):
    """Error for a local store that cannot be migrated safely; it was not changed."""


class SessionStoreError(QuarkError):
    """Error for a store that is unreachable or cannot serve the call.

    Accepted records stay queued and are delivered when the store answers again.
    """


class StoreUnavailableError(SessionStoreError):
    """The store is out of reach now, and the same call may go well later.

    A run that is restarted begins without it; see `quark_core.runs.primary_store`.
    """


class StoreUnauthorizedError(StoreUnavailableError):
    """The store refuses our credentials, which may be renewed without a restart."""


class StoreNotFoundError(SessionStoreError):
    """There is no store at the place that was named."""


class RunNotFoundError(SessionStoreError):
    """Error for a run that does not exist."""


class InvalidRunStateError(SessionStoreError):
    """Error for a call that the state of the run, session or writer forbids."""


class ArtifactNotFoundError(SessionStoreError):
    """Error for a missing artifact or payload; the message gives the reason."""


class ArtifactDamagedError(SessionStoreError):
    """Error for a payload that does not match its stored hash."""


class RetentionHookError(QuarkError):
    """Error for a failed retention hook; the artifact is stored."""


class RaisedAlert(Protocol):
    """What an alert says at least; it is an `AlertRecord`."""

    @property
    def rule_id(self) -> str:
        """The rule that found it."""

    @property
    def severity(self) -> str:
        """Its severity: info, warning, error or critical."""

    @property
    def title(self) -> str:
        """What is wrong, in a few words."""

    @property
    def summary(self) -> str:
        """The same in a sentence."""

    @property
    def fact(self) -> str:
        """What was seen."""

    @property
    def step(self) -> int | None:
        """Where it began."""

    @property
    def culprit(self) -> str | None:
        """The layer or metric at fault."""


class AskedStop(Protocol):
    """What a request to stop says; it is a `StopRequest`."""

    @property
    def by(self) -> str:
        """Who asks, as `user@host`."""

    @property
    def at(self) -> str:
        """When, as ISO 8601 in UTC."""

    @property
    def reason(self) -> str | None:
        """Why."""


class TrainingHalted(QuarkError):
    """Exception that stops the training after an alert, if `halt_on` is set.

    A logging call raises it and logs nothing. Later calls work again.

    Attributes:
        alert: The alert, an `AlertRecord`.
    """

    def __init__(self, message: str, alert: RaisedAlert) -> None:
        super().__init__(message)
        self.alert = alert

    def __reduce__(self) -> tuple[type[TrainingHalted], tuple[str, RaisedAlert]]:
        # By its message alone it could not be made again in the process that it is sent to.
        return type(self), (str(self), self.alert)


class StopRequested(QuarkError):
    """Exception that stops a run which was started with `on_stop="raise"`.

    A logging call raises it once and logs nothing. Later calls work again.

    Attributes:
        request: The `StopRequest`: its author, time and reason.
    """

    def __init__(self, message: str, request: AskedStop) -> None:
        super().__init__(message)
        self.request = request

    def __reduce__(self) -> tuple[type[StopRequested], tuple[str, AskedStop]]:
        # By its message alone it could not be made again in the process that it is sent to.
        return type(self), (str(self), self.request)


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
        lacks_from: Number of the writer's first batch that the backend had and has lost: it
            is given those before this one once more; None where it lacks none.
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        retry_after_s: float | None = None,
        lacks_from: int | None = None,
    ) -> None:
        super().__init__(message, backend=backend)
        self.retry_after_s = retry_after_s
        self.lacks_from = lacks_from


class BackendOutcomeUnknown(BackendUnavailable):
    """Nobody can tell whether the backend has this batch.

    A backend that is idempotent gets it again. For another one it counts as
    unknown, and is not sent again, since that could store it twice.
    """


class BackendUnusable(BackendUnavailable):
    """The backend lacks what only a person can give it: a package, an address, a key.

    The lane pauses and asks again every few minutes; no end of a run waits for it.
    """


class BackendUnauthorized(BackendUnusable):
    """The backend refuses our credentials."""


class BackendRejected(BackendError):
    """The backend will never take this batch; the lane puts it in quarantine."""


class BackendContractError(BackendError):
    """A plugin breaks its contract, such as a declared capability that is absent."""


class UnknownBackendError(BackendError, ValueError):
    """No installed backend has the name or the URI scheme that was asked for."""


class MissingLibraryError(QuarkError, ImportError):
    """A library that Quark does not need by itself is not installed; the message says how."""


def import_library(name: str, extra: str, call: str) -> Any:
    """Import a module of a library that comes with an extra.

    Raises:
        MissingLibraryError: It is not installed; the message says what needs
            it and how to install it.
    """
    try:
        return import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise MissingLibraryError(
            f'{call} needs {library}, which is not installed: pip install "quark-tracker[{extra}]"',
            name=library,
        ) from error


def describe_error(error: BaseException) -> str:
    """An exception in one line: errors of Quark's speak for themselves, others by their type.

    That records wait is left to whoever shows the line: each of them says so itself.
    """
    text = str(error)
    if isinstance(error, QuarkError) and text:
        return text.removesuffix(_WAIT)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
