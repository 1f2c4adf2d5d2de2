"""Runs pages of the documentation, one after the other, and prints what went wrong: a program of test_docs_blocks.py.

In a process of its own: a page may install for good what a project installs once.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import django


def main() -> None:
    django.setup()
    from django.core.management import call_command

    from tests.e2e.test_docs import run_page

    call_command("migrate", verbosity=0)
    raised = {}
    for page in sys.argv[1:]:
        try:
            run_page(Path(page))
        except Exception:
            raised[page] = traceback.format_exc()
    print(json.dumps(raised))


if __name__ == "__main__":
    main()
