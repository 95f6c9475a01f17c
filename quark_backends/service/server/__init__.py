"""The server of the persistence service: routes, keys, limits, stores of workspaces."""
