"""Maintenance of the store: compaction, copies, removal, newer tables."""
