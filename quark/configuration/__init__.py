"""Configurations that have layers, and the origins of their settings."""
