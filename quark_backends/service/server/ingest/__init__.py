"""What the service takes in."""
