"""Foretells how much fuel a ferry burns, from the weather and its load."""
