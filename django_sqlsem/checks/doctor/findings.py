"""One thing that the doctor found, and how bad it is.

What is examined: one alias, over a connection as the library itself opens them, and what is known of it so far.
"""

from __future__ import annotations

import enum
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.conf import Config, config

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


class Level(enum.StrEnum):
    """How bad a finding is, the least first."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Its place among the levels, from 0."""
        return list(Level).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one database, or about the settings (then ``database`` is empty)."""

    id: str
    level: Level
    text: str
    #: What to do about it; empty if nothing has to be done.
    advice: str = ""
    database: str = ""

    @property
    def docs(self) -> str:
        """Where it is explained."""
        return f"docs/checks.md#{self.id.replace('.', '')}".lower()

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "id": self.id,
            "level": self.level.value,
            "database": self.database,
            "text": self.text,
            "advice": self.advice,
            "docs": self.docs,
        }


def ok(id: str, text: str) -> Finding:  # noqa: A002
    """All is well."""
    return Finding(id, Level.OK, text)


def note(id: str, text: str, advice: str = "") -> Finding:  # noqa: A002
    """Good to know."""
    return Finding(id, Level.NOTE, text, advice)


def warning(id: str, text: str, advice: str) -> Finding:  # noqa: A002
    """Something works less well than it could, or will go wrong one day."""
    return Finding(id, Level.WARNING, text, advice)


def error(id: str, text: str, advice: str) -> Finding:  # noqa: A002
    """Locks don't work, or don't protect."""
    return Finding(id, Level.ERROR, text, advice)


#: How many round trips are measured; the median counts.
ROUND_TRIPS: Final = 20


@dataclass
class Patient:
    """One alias with an open connection."""

    alias: str
    connection: BaseDatabaseWrapper
    #: What keeps the slots of dead processes waiting for their leases; empty if beacons should work.
    no_beacons: list[str] = field(default_factory=list)
    #: Whether the tables are there, so that more can be looked at.
    has_tables: bool = True
    #: Seconds of one round trip.
    round_trip: float = 0.0

    @property
    def vendor(self) -> str:
        """Django's word for the kind of database."""
        return self.connection.vendor

    @property
    def options(self) -> dict[str, Any]:
        """``OPTIONS`` of the alias as the project wrote them."""
        from django.db import connections

        return dict(connections.settings[self.alias].get("OPTIONS") or {})

    @property
    def config(self) -> Config:
        """What ``SQLSEM`` says for the alias."""
        return config(self.alias)

    def row(self, sql: str) -> tuple[Any, ...]:
        """Return the first row of a query, all of ``None`` values cut to an empty tuple if there is none."""
        with self.connection.cursor() as cursor:
            cursor.execute(sql)
            return tuple(cursor.fetchone() or ())

    def value(self, sql: str, default: Any = None) -> Any:
        """Return the first value of the first row."""
        row = self.row(sql)
        return row[0] if row else default

    def variables(self, *names: str) -> dict[str, str]:
        """Return variables of a MySQL or MariaDB server by name, in upper case; those it has not are left out."""
        listed = ", ".join(f"'{name}'" for name in names)
        with self.connection.cursor() as cursor:
            cursor.execute(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({listed})")
            return {str(name).lower(): str(value).upper() for name, value in cursor.fetchall()}

    def measure(self) -> float:
        """Measure and return the median of some round trips, in seconds."""
        dual = " FROM DUAL" if self.vendor == "oracle" else ""
        took = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            self.value(f"SELECT 1{dual}")
            took.append(time.perf_counter() - started)
        self.round_trip = statistics.median(took)
        return self.round_trip


def milliseconds(seconds: float) -> str:
    """Return ``0.34 ms``, ``12 ms`` or ``1.5 s``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.2f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
