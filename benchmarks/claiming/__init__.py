"""The parts of `benchmarks/claims.py`."""
