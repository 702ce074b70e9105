"""`python -m flexgen`: the same program as the command `flexgen`."""

from __future__ import annotations

import sys

from flexgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
