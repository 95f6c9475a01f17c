"""The old place of `quark_core.backends.contract`; it goes in 1.0."""

import warnings

from quark_core.backends.contract import *  # noqa: F403 - whatever it offers

warnings.warn(
    "quark_core.backend is quark_core.backends.contract now; the old name goes in 1.0",
    DeprecationWarning,
    stacklevel=2,
)
