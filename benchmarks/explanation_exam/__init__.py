"""The exam of `quark why`: real small trainings with a known change, and what is said of it."""
