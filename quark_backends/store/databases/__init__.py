"""The databases of the store: SQLite and PostgreSQL, their tables, how they are opened."""
