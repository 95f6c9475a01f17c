"""Statistics of parameters, their gradients and their updates."""
