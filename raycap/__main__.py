"""`python -m raycap` is `raycap`."""

import sys

from raycap.jobs.cli import main

sys.exit(main())
