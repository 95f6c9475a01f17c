"""What tests as a whole have turned off by variables; see conftest.py."""

SET_FOR_TESTS = ("QUARK_CAPTURE", "QUARK_QUIET", "QUARK_SOURCES", "QUARK_SYSTEM_METRICS")
