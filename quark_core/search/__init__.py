"""The language in which runs are searched for."""
