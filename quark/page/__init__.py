"""The page on which runs are looked at: what `quark ui` serves. It imports `quark_core` only."""
