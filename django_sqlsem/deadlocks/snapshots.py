"""Frozen read models of waits and deadlocks, and the sentences that tell people of them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from django_sqlsem.durations import duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django_sqlsem.snapshots import HolderSnapshot

#: So many of one side are named in a sentence.
NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class WaitSnapshot:
    """One thread or task that waits for a name. ``age`` is seconds by the database's clock."""

    #: What tells it from other waits.
    wait_id: str
    name: str
    #: 0: all slots.
    take: int
    mode: str
    host: str
    pid: int
    thread: str
    label: str
    user: str
    waiting_since: datetime.datetime
    age: float
    #: What it holds meanwhile.
    holds: tuple[HolderSnapshot, ...] = ()
    #: Who holds what it waits for; in a deadlock, only those who are part of it.
    held_by: tuple[HolderSnapshot, ...] = ()
    #: In a deadlock: for whose ends it waits, by wait id.
    waits_for: tuple[str, ...] = field(default=(), repr=False)

    @property
    def who(self) -> str:
        """The process, the thread and the work in one phrase."""
        return _who(self)

    @property
    def holds_text(self) -> str:
        """What it holds in one phrase; empty if that is nothing."""
        return _listed(f"{holder.name!r} ({holder.where})" for holder in self.holds)

    @property
    def held_by_text(self) -> str:
        """Who holds what it waits for in one phrase; empty if that is nobody."""
        return _listed(f"{_who(holder)} ({holder.where})" for holder in self.held_by)

    def __str__(self) -> str:
        text = f"{self.who} has waited {duration(self.age)} for {self.name!r}"
        if self.held_by:
            text += f", held by {self.held_by_text}"
        return f"{text}, and holds {self.holds_text}" if self.holds else text


@dataclass(frozen=True, slots=True)
class DeadlockSnapshot:
    """Waits of which none can end before another one has ended, in order round the cycle."""

    waits: tuple[WaitSnapshot, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are waited for in it, each once."""
        return tuple(dict.fromkeys(wait.name for wait in self.waits))

    @property
    def youngest(self) -> WaitSnapshot:
        """The wait that began last, of those who hold something: that is broken off if settings say so."""
        return max((wait for wait in self.waits if wait.holds), key=lambda wait: (-wait.age, wait.wait_id))

    def __str__(self) -> str:
        known = {wait.wait_id: wait for wait in self.waits}
        return "; ".join(_side(wait, known) for wait in self.waits)


def _side(wait: WaitSnapshot, known: dict[str, WaitSnapshot]) -> str:
    """Return one side of a deadlock: who waits for what, and who has it."""
    text = f"{wait.who} has waited {duration(wait.age)} for {wait.name!r}"
    if wait.held_by:
        return f"{text}, held by {_listed(dict.fromkeys(_who(holder) for holder in wait.held_by))}"
    ahead = dict.fromkeys(known[each].who for each in wait.waits_for if each in known)
    return f"{text}, behind {_listed(ahead)}" if ahead else text


def _who(someone: WaitSnapshot | HolderSnapshot) -> str:
    place = f"{someone.host} pid {someone.pid} {someone.thread}".strip()
    return f"{place} ({someone.label})" if someone.label else place


def _listed(texts: Iterable[str]) -> str:
    found = list(texts)
    more = len(found) - NAMED
    return ", ".join(found) if more <= 0 else f"{', '.join(found[:NAMED])} and {more} more"
