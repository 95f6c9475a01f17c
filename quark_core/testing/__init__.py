"""For authors of backends: the conformance kit, batches for it, backends that fail on order.

Needs pytest; import from the modules, such as
`from quark_core.testing.conformance import BackendConformance`.
"""

import sys

_PARTS = (
    "belonging",
    "coordination",
    "following",
    "process",
    "reading",
    "store",
    "workers",
    "writing",
)

if "pytest" in sys.modules:
    # So that a failing test of the kit says what was compared.
    sys.modules["pytest"].register_assert_rewrite(
        *(f"quark_core.testing.{part}_conformance" for part in _PARTS)
    )
