"""What the store needs besides: compaction, copies, removal, newer tables."""
