"""What the service keeps for whom: workspaces, keys, stores, payloads."""
