"""What is read back out of the store."""
