"""A run's mirrors after the fact: what they have, whether it is all, and sending it again."""
