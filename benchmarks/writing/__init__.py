"""Parts of `benchmarks/writers.py`."""
