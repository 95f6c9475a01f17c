"""What the mirrors of a run in another tool have in common."""
