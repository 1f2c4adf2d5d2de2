"""One thing that the doctor found, and how bad it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


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
