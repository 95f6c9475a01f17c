"""The old place of `quark_core.records.columns`; it goes in 1.0."""

import warnings

from quark_core.records.columns import *  # noqa: F403 - whatever it offers

warnings.warn(
    "quark_core.columns is quark_core.records.columns now; the old name goes in 1.0",
    DeprecationWarning,
    stacklevel=2,
)
