"""The analyzers: alerts, health scores, phases and comparisons from a run's records."""
