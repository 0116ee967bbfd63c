"""`python -m raycap` is `raycap`, which imports nothing from the working folder."""

import sys
from pathlib import Path


def main() -> int:
    """Runs a command. Removes the working folder from sys.path first, unless raycap itself is imported from there."""
    if not sys.flags.safe_path and sys.path[0] != str(Path(__file__).parents[1]):
        del sys.path[0]
    from raycap.jobs import cli

    return cli.main()


sys.exit(main())
