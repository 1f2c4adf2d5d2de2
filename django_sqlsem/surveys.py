"""What an overview says of all names at once: totals, and which names are not merely idle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from django_sqlsem.naming import key_of
from django_sqlsem.snapshots import SemaphoreSnapshot

#: What an operator can ask a list of names for.
SurveyState: TypeAlias = Literal["held", "stale", "waiting", "paused", "draining"]
SURVEY_STATES: Final[tuple[SurveyState, ...]] = ("held", "stale", "waiting", "paused", "draining")
#: How many names of each state a survey lists: one more than these need another pass over all slots for the totals.
MOST: Final = 5000


@dataclass(frozen=True, slots=True)
class Listed:
    """The names of one state by their keys, with how many slots, threads or tasks make it so: the largest first."""

    counts: Mapping[str, int] = field(default_factory=dict)
    #: Whether these are all; else it is so many that have most.
    complete: bool = True

    @classmethod
    def of(cls, counts: Iterable[tuple[str, int]], most: int = MOST) -> Listed:
        """Keep the largest."""
        found = sorted(((key, count) for key, count in counts if count), key=lambda pair: -pair[1])
        return cls(dict(found[:most]), len(found) <= most)


@dataclass(frozen=True, slots=True)
class Survey:
    """How all names of a database stand at one instant. Names are told by the keys of their rows."""

    #: How many slots are taken by live permits, and how many belong to holders that seem gone.
    held: int = 0
    stale: int = 0
    #: How many threads and tasks wait.
    waiting: int = 0
    #: How many names grant nothing, and how many of these still have holders.
    paused: int = 0
    draining: int = 0
    names: Mapping[str, Listed] = field(default_factory=dict)

    def listed(self, state: str) -> Listed:
        """Return the names in a state."""
        return self.names.get(state, Listed())


def survey_of(snapshots: Iterable[SemaphoreSnapshot]) -> Survey:
    """Return what snapshots of all names amount to."""
    counts: dict[str, list[tuple[str, int]]] = {state: [] for state in SURVEY_STATES}
    for snapshot in snapshots:
        key = key_of(snapshot.name)
        counts["held"].append((key, snapshot.held))
        counts["stale"].append((key, snapshot.stale))
        counts["waiting"].append((key, snapshot.waiting))
        counts["paused"].append((key, int(snapshot.paused)))
        counts["draining"].append((key, snapshot.held if snapshot.draining else 0))
    return Survey(
        held=sum(count for _key, count in counts["held"]),
        stale=sum(count for _key, count in counts["stale"]),
        waiting=sum(count for _key, count in counts["waiting"]),
        paused=sum(count for _key, count in counts["paused"]),
        draining=sum(1 for _key, count in counts["draining"] if count),
        names={state: Listed.of(each) for state, each in counts.items()},
    )
