"""The command `python -m refimpl COMMAND`."""

from .cli import main

if __name__ == "__main__":
    main()
