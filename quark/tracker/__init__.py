"""The multiplexer that many training scripts know, on top of a run."""
