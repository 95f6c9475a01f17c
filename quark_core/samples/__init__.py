"""The samples of mini-batches: what a batch says of itself, and what is found out from many."""
