"""What this process prints, line by line: taps on its streams, and a tee below them."""
