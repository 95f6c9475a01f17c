"""Parts of `benchmarks/instrumentation.py`."""
