"""The client backend of the persistence service."""
