"""What analyzers make of a run's records: alerts, health scores, phases and comparisons."""
