"""Parts of `benchmarks/service.py`: what the persistence service takes and gives."""
