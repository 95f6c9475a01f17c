"""What the layers of a model give, and the gradients in them."""
