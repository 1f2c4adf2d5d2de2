"""Timeouts, leases and other lengths of time: checked once, at the call that gave them.

Lengths of time as people write and read them: ``90s``, ``15m``, ``2h``, ``7d``.
"""

from __future__ import annotations

import datetime
import math
import re
from typing import Final, Literal, TypeAlias

from django_sqlsem.core.text import shown

Seconds: TypeAlias = "int | float | datetime.timedelta"


class Unset:
    """The type of ``UNSET``: an argument that the caller left out."""

    def __repr__(self) -> str:
        return "<unset>"

    def __bool__(self) -> Literal[False]:
        return False

    def __reduce__(self) -> str:
        """A copy of it, or one that was pickled, is itself: so semaphores equal their copies."""
        return "UNSET"


UNSET: Final = Unset()

#: About 31 years: longer lengths are mistakes, and microseconds of them still fit any database.
MAX_SECONDS: Final = 1e9


def to_seconds(value: object, *, what: str, minimum: float = 0.0, allow_none: bool = False) -> float | None:
    """Return ``value`` as seconds.

    ``value`` is a number of seconds or a ``timedelta``; ``None`` only where ``allow_none`` is set. Raises
    ``TypeError`` for any other type and ``ValueError`` for a number that is negative, not finite, below
    ``minimum`` or absurdly long. ``what`` names the argument in the message.
    """
    if value is None and allow_none:
        return None
    if isinstance(value, datetime.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        allowed = "seconds (a number) or a timedelta" + (", or None for no limit" if allow_none else "")
        raise TypeError(f"{what} must be {allowed}, not {shown(value)} of type {type(value).__name__}.")
    else:
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    if not math.isfinite(seconds):
        hint = " Use None to wait without a limit." if allow_none else ""
        raise ValueError(f"{what} must be a finite number of seconds, not {shown(value)}.{hint}")
    if seconds < minimum or seconds > MAX_SECONDS:
        raise ValueError(f"{what} must be from {minimum:g} to {MAX_SECONDS:g} seconds, not {shown(value)}.")
    return seconds


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
