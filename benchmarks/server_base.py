"""What a benchmark asks of a database server."""

from __future__ import annotations

import os
import secrets
from typing import Any

#: Part of all names of this run, so that several runs can go on side by side.
RUN = f"{os.getpid()}_{secrets.token_hex(2)}"


class Server:
    """One database server, or SQLite: what it is, and what it tells about itself while it is measured."""

    name: str

    def __init__(self, version: str) -> None:
        self.version = version

    def create(self, database: str) -> dict[str, Any]:
        """Create a database and return its entry of ``DATABASES``."""
        raise NotImplementedError

    def drop(self, database: str) -> None:
        """Drop a database that ``create`` made."""
        raise NotImplementedError

    def statements(self) -> float | None:
        """Return how many statements or transactions the server has done so far, or ``None`` if it does not tell."""
        return None

    def spare_connections(self) -> int | None:
        """Return how many more connections the server would accept, or ``None`` for no limit."""
        return None

    def cpu(self) -> float | None:
        """Return the CPU seconds that the server's processes have used so far, or ``None`` if it is elsewhere."""
        return None

    def flushes(self) -> float | None:
        """Return how often the server has flushed to the disk so far, or ``None`` if it does not tell.

        Sessions may report theirs as they end.
        """
        return None

    def waits_on(self) -> list[str]:
        """Return what the server's sessions wait for right now, as far as it tells."""
        return []
