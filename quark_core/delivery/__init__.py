"""Delivery: from the writers' channels, through batches, to one lane per backend."""
