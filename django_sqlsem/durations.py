"""Lengths of time as people write and read them: ``90s``, ``15m``, ``2h``, ``7d``."""

from __future__ import annotations

import re
from typing import Final

from django_sqlsem.timeouts import to_seconds

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


def parse_duration(text: str) -> float:
    """Return ``text`` as seconds: a plain number of seconds, or numbers with units (``1h30m``).

    Raises ``ValueError`` that says what is allowed.
    """
    text = text.strip()
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    else:
        parts = _PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(f"{text!r} is no length of time: write seconds, or 90s, 15m, 2h, 7d.")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return to_seconds(seconds, what="the length of time") or 0.0


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units: ``0.4 s``, ``12 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"
