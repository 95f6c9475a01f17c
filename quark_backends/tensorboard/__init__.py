"""The TensorBoard mirror: the run as event files."""
