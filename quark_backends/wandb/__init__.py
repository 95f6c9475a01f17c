"""The W&B mirror: the run as a run of Weights & Biases, driven from a process of its own."""
