"""The CSV mirror: plain files that any tool reads."""
