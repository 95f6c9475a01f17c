"""Takes runs of other tools into a store; `neutral_run` says how to add a tool."""
