"""People are told, wherever they are, what happens to runs: made, held back, sent once."""
