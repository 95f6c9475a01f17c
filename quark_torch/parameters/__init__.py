"""What parameters, their gradients and their updates are like."""
