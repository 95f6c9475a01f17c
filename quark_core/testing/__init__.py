"""For authors of backends: the conformance kit, batches for it, backends that fail on order.

Needs pytest; import from the modules, such as
`from quark_core.testing.conformance import BackendConformance`.
"""

import sys

_MODULES = (
    "conformance",
    "coordination_conformance",
    "process_conformance",
    "reading_conformance",
    "store_conformance",
    "workers_conformance",
)

if "pytest" in sys.modules:
    # So that a failing test of the kit says what was compared.
    sys.modules["pytest"].register_assert_rewrite(
        *(f"quark_core.testing.{module}" for module in _MODULES)
    )
