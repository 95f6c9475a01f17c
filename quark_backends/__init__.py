"""Storage backends that come with Quark."""
