"""The command of ``manage.py locks run`` in the soak test: ``python -m tests.places.soak_body SECONDS``."""

from __future__ import annotations

import sys
import time

from tests.places.presence import inside

if __name__ == "__main__":
    with inside("locks run"):
        time.sleep(float(sys.argv[1]))
