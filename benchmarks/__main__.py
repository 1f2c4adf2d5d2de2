"""``python -m benchmarks``."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # the fork server of multiprocessing imports this module too
    from benchmarks.cli import main

    sys.exit(main())
