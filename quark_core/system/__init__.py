"""This process and the machine it is on: what lives, what links where, which hardware."""
