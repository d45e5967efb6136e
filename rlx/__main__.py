"""`python -m rlx` is the `rlx` command."""

from rlx.cli import main

if __name__ == "__main__":
    main()
