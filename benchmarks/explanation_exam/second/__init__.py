"""The second paper: another project, another way to write it, other changes."""
