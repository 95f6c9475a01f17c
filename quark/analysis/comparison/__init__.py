"""Comparison of runs: what changed, what differs, and whether that means anything."""
