"""Runs that are open in this process, and runs that are looked up: opened, read, recovered."""
