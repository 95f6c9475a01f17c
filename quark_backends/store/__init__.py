"""The SQL store that the embedded default and the service share."""
