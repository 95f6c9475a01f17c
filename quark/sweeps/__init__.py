"""Sweeps: lists of trials that any number of workers share, and the searches that make them."""
