"""The old place of `quark_core.backends.hookspecs`; it goes in 1.0."""

import warnings

from quark_core.backends.hookspecs import *  # noqa: F403 - whatever it offers

warnings.warn(
    "quark_core.hookspecs is quark_core.backends.hookspecs now; the old name goes in 1.0",
    DeprecationWarning,
    stacklevel=2,
)
