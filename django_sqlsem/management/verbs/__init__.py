"""The verbs of ``manage.py locks``, a module each.

A verb's docstring is its help; ``add_arguments`` declares what it takes, and ``handle`` does it.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

VERBS: Final = ("list", "show", "waits", "purge", "revoke", "stop", "drain", "set", "doctor", "sql", "run")


def load(verb: str) -> Any:
    """Import the module of a verb."""
    return importlib.import_module(f"{__name__}.{verb}")
