"""For authors of backends: the conformance kit, batches for it, backends that fail on order.

Needs pytest; import from the modules, such as
`from quark_core.testing.conformance import BackendConformance`.
"""
