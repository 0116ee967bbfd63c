"""`python -m raycap` is `raycap`.

Python puts the working folder first on sys.path, so a file timm.py there would be imported instead of the library. The
folder is removed, unless raycap itself is imported from there.
"""

import sys
from pathlib import Path

if not sys.flags.safe_path and sys.path[0] != str(Path(__file__).parents[1]):
    del sys.path[0]

from raycap.jobs.cli import main

sys.exit(main())
