"""What the machine under a run does: its processors, memory, processes and GPUs."""
