"""Artifacts: how payloads are named, kept by content, encoded and read back."""
