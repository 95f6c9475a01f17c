"""Writing to the store, each batch exactly once."""
