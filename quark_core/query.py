"""The old place of `quark_core.records.query`; it goes in 1.0."""

import warnings

from quark_core.records.query import *  # noqa: F403 - whatever it offers

warnings.warn(
    "quark_core.query is quark_core.records.query now; the old name goes in 1.0",
    DeprecationWarning,
    stacklevel=2,
)
