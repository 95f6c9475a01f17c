"""The parts of `benchmarks/sweep_campaign.py`."""
