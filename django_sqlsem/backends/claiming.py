"""What an acquisition asks a backend for, and how its process is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from django_sqlsem.modes import SHARED, UPGRADE, WHOLE, line_of

if TYPE_CHECKING:
    from django_sqlsem.identity import HolderIdentity
    from django_sqlsem.naming import Resource


@dataclass(frozen=True, slots=True)
class Presence:
    """How others reach a process, and how they tell that it lives. Both may change while it runs."""

    #: Where a grant is announced to it; empty: nowhere, it has to look.
    channel: str = ""
    #: A LIKE pattern of the channels whose processes can reach it.
    near: str = ""
    #: A LIKE pattern of the channels whose bells can be rung from here.
    bells: str = ""
    #: Whether its beacon is lit.
    beacon: bool = False


#: Of a process that nobody can reach.
UNREACHED: Final = Presence()


@dataclass(frozen=True, slots=True)
class Claim:
    """What one acquisition asks for. ``permit_id`` is random, and known before anything is sent."""

    resource: Resource
    permit_id: str
    #: The caller's own number of slots; ``None``: as declared elsewhere.
    slots: int | None
    take: int
    #: Seconds that the grant lasts unless it is renewed.
    lease: float
    #: Whether the claim stands behind those that already wait.
    fair: bool
    holder: HolderIdentity
    presence: Presence = UNREACHED
    #: Whether the grant must survive a crash of the database's server.
    durable: bool = True
    #: The name under which a task keeps its place while it is away; empty for anybody else.
    rank: str = ""
    #: Whether it has come back to that place, and so does not stand behind others of its process.
    apart: bool = False
    #: How it shares the name with others. ``take`` is 0 where that means all slots.
    mode: str = SHARED

    @property
    def got(self) -> str:
        """The mode of what it gets."""
        return WHOLE if self.mode == UPGRADE else self.mode

    @property
    def line(self) -> str:
        """The line in which it waits inside its process."""
        line = line_of(self.resource.key, self.mode)
        return f"{line} {self.rank}" if self.apart else line
