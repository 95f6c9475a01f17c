"""A Quark backend that keeps runs as JSON lines on any file system that fsspec reaches."""
