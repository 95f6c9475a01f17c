"""What all tests share."""

import pytest

# The kit asserts in a module that pytest would not rewrite by itself.
pytest.register_assert_rewrite("quark_core.testing.conformance")
