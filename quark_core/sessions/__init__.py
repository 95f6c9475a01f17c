"""A run's life as its user sees it: from start to end, and when the process ends first."""
