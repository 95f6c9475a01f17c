"""How the store keeps many rows: as chunks of columns, with roll-ups beside them."""
