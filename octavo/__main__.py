"""`python -m octavo` and the script `octavo`: the command, and a plain end for Ctrl-C while Python still imports."""

import sys


def main() -> None:
    """Run the `octavo` command."""
    try:
        from octavo.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
