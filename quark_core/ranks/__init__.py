"""Which process of a launch this is, and how its ranks agree on a run."""
