"""Takes runs of other tools into a store; see `quark.importing.foreign` for how to add a tool."""
