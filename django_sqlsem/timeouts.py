"""Timeouts, leases and other lengths of time: checked once, at the call that gave them."""

from __future__ import annotations

import datetime
import math
from typing import Final, Literal, TypeAlias

from django_sqlsem.wording import shown

Seconds: TypeAlias = "int | float | datetime.timedelta"


class Unset:
    """The type of ``UNSET``: an argument that the caller left out."""

    def __repr__(self) -> str:
        return "<unset>"

    def __bool__(self) -> Literal[False]:
        return False


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
