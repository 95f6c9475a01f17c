"""Why a result changed: whether it did, since when, what differs, and what is to blame."""
