"""Reading from the store."""
