"""Parts of the benchmark `diagnosis_comparison.py`."""
