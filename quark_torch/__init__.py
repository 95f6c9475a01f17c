"""PyTorch instrumentation; its hook engine and parameter diagnostics come with a later version."""
