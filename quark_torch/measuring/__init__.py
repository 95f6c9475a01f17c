"""Statistics of tensors: on the CPU at once, on a device without waiting for it."""
