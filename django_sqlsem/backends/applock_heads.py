"""Whether the first in a line has stopped: what claims that yield to it have seen."""

from __future__ import annotations

from typing import Final

from django_sqlsem.backends.applock_memory import REMEMBERED
from django_sqlsem.clocks import boot_now

#: A free slot behind a closed gate, without any grant in between: so far apart must two looks be, in seconds, for the
#: head to count as stopped. Without rows nothing tells of grants in between, so more looks must agree.
STUCK_AFTER: Final = 0.15
STUCK_LOOKS: Final = {True: 3, False: 5}
#: Looks further apart than this prove nothing, in seconds.
STUCK_WITHIN: Final = 5.0


class Heads:
    """By line: the looks that found a free slot behind the gate, the time of the last one, and its mark."""

    def __init__(self) -> None:
        self._looks: dict[str, tuple[int, float, int]] = {}

    def note(self, line: str, mark: int) -> None:
        """Note such a look. ``mark``: the greatest token of the name's slots."""
        now = boot_now()
        looks, at, before = self._looks.get(line, (0, 0.0, mark))
        if before != mark or now - at > STUCK_WITHIN:
            looks = 0
        if looks == 0 or now - at >= STUCK_AFTER:
            if len(self._looks) > REMEMBERED:
                self._looks.clear()
            self._looks[line] = (looks + 1, now, mark)

    def moved(self, line: str) -> None:
        """Note that no such thing was seen."""
        self._looks.pop(line, None)

    def is_stuck(self, line: str, looks: int) -> bool:
        """Return whether so many looks have agreed."""
        return self._looks.get(line, (0, 0.0, 0))[0] >= looks
