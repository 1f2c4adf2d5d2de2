"""Django's check messages, with an id of ours and a hint that leads to its section of ``docs/checks.md``.

An id of system checks begins with the letter of its level; those of the doctor, which begin with D, have any level.
"""

from __future__ import annotations

from typing import Any

from django.core import checks

from django_sqlsem.core.text import check_page


def ok(number: str, text: str) -> checks.CheckMessage:
    """All is well; said by the doctor only."""
    return checks.Debug(text, id=f"sqlsem.{number}")


def note(number: str, text: str, advice: str = "") -> checks.CheckMessage:
    """Good to know."""
    return checks.Info(text, **_explained(number, advice))


def warning(number: str, text: str, advice: str = "") -> checks.CheckMessage:
    """Something works less well than it could, or will go wrong one day."""
    return checks.Warning(text, **_explained(number, advice))


def error(number: str, text: str, advice: str = "") -> checks.CheckMessage:
    """Locks don't work, or don't protect."""
    return checks.Error(text, **_explained(number, advice))


def _explained(number: str, advice: str) -> dict[str, Any]:
    message_id = f"sqlsem.{number}"
    return {"id": message_id, "hint": f"{advice} See {check_page(message_id)}".lstrip()}
