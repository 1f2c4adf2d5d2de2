"""Patterns of names: shell-style, case-sensitive, matched in Python after the database has cut by the prefix."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SPECIAL = re.compile(r"[*?\[]")


def literal_prefix(glob: str | None) -> str | None:
    """Return what every name that matches ``glob`` begins with; ``None`` if no legal name can match."""
    if not glob:
        return ""
    special = _SPECIAL.search(glob)
    prefix = glob[: special.start()] if special else glob
    try:
        prefix.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return None if "\x00" in prefix else prefix


def matcher(glob: str | None) -> Callable[[str], bool]:
    """Return a test of names: ``fnmatch`` with case, newlines included; without a glob it passes all."""
    if not glob:
        return lambda name: True
    pattern = re.compile(fnmatch.translate(glob))
    return lambda name: pattern.match(name) is not None
