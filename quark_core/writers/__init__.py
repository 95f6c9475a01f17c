"""Writers: what a training script logs through."""
