"""The old place of `quark_core.backends.kept_batches`; it goes in 1.0."""

import warnings

from quark_core.backends.kept_batches import *  # noqa: F403 - whatever it offers

warnings.warn(
    "quark_core.kept_batches is quark_core.backends.kept_batches now; the old name goes in 1.0",
    DeprecationWarning,
    stacklevel=2,
)
