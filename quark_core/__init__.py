"""Core of Quark: records, session, writers, delivery and analysis. Imports no backend."""
