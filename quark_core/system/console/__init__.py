"""The console output of this process, line by line: taps on its streams, and a tee below."""
