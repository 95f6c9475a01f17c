"""`python -m quark` is the `quark` command."""

from quark.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
