"""The embedded store: SQLite under `storage_dir/.quark`, no server, no account."""
