"""One module for each tool that runs are imported from; see `quark.importing.neutral_run`."""
