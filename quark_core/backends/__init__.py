"""What a storage backend is: the contract, what it returns, and how backends are found."""
