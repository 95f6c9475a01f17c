"""What comes into the store, each batch exactly once."""
