"""PyTorch instrumentation: layers by hooks, parameters by snapshots, statistics in one read."""
