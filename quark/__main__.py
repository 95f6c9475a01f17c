"""`python -m quark` is the `quark` command."""

from quark.cli import main

if __name__ == "__main__":
    main()
