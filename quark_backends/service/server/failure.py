"""What a request of the service fails with; the application makes the envelope of it."""

from __future__ import annotations

from quark_backends.service.protocol import ErrorCode

__all__ = ["ServiceFailure"]


class ServiceFailure(Exception):
    """A request that is not served.

    Attributes:
        code: What went wrong; it decides the HTTP status.
        message: What happened and what to do; never a secret.
        field: Which part of the request is at fault, or None.
        retry_after_s: When the client may come again, or None.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
