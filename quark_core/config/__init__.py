"""User input: arguments, configs and settings. Secrets are removed here."""
