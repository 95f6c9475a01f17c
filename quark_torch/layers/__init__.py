"""The activations of a model's layers, and their gradients."""
