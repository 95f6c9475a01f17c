"""The compiled reading of tensors on the CPU: its source, its build and its loading."""
