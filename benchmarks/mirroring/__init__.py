"""Parts of `mirrors.py`: one training with five backends, read back by each tool's own reader."""
