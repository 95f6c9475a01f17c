"""Quark's mirrors by the names that a tracker's users know them by."""
