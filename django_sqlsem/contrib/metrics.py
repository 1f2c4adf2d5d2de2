"""What Prometheus and OpenTelemetry have in common: labels, the signals of this process, and a look at the database.

There are few labels, however many names there are.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final

from django.db import connections

from django_sqlsem import queries, signals
from django_sqlsem.core.templates import Field, Template
from django_sqlsem.locks.semaphore import Semaphore
from django_sqlsem.snapshots import LossReason

#: Upper bounds of waits and holds, in seconds. One that was granted at once waited 0.
WAIT_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
HOLD_BUCKETS: Final = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
#: How many names in use one look reads at most; those beyond are not counted.
MOST_IN_USE: Final = 1000
#: The label of all that came after the most that there may be.
OTHER: Final = "other"
MOST: Final = 100


class Labels:
    """The labels of one set of metrics. A label is a decorator's template, or else a name.

    ``label``: a function of a name (a str) that returns its label, instead of that. ``templates``: templates of
    decorators, to know the names in the database that were made from them; those of permits that this process has had
    are learnt. ``most``: how many labels there may be; whatever comes later is ``other``, for as long as the process
    lives. Raises ``TypeError`` or ``ValueError`` for bad arguments.
    """

    def __init__(
        self, *, label: Callable[[str], str] | None = None, templates: Iterable[str] = (), most: int = MOST
    ) -> None:
        if label is not None and not callable(label):
            raise TypeError(f"label must be a function of a name or None, not {label!r}.")
        if most < 1:
            raise ValueError(f"most must be an int of 1 or more, not {most!r}.")
        self._label = label
        self._most = most
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._given: dict[str, None] = {}
        #: Counts the new labels: as its next number is drawn at once, no thread needs a lock.
        self._numbers = itertools.count()
        for template in [templates] if isinstance(templates, str) else templates:
            self.learn(template)

    def learn(self, template: str) -> None:
        """Know the names that a template makes. Raises ``ValueError`` for what is no template."""
        if template not in self._patterns and len(self._patterns) < self._most:
            self._patterns = {**self._patterns, template: _pattern(template)}

    def of(self, semaphore: Semaphore) -> str:
        if self._label is None and semaphore.template:
            self.learn(semaphore.template)
            return self._bounded(semaphore.template)
        return self.of_name(semaphore.name)

    def of_name(self, name: str) -> str:
        if self._label is not None:
            return self._bounded(str(self._label(name)))
        found = next((template for template, pattern in self._patterns.items() if pattern.fullmatch(name)), name)
        return self._bounded(found)

    @property
    def given(self) -> tuple[str, ...]:
        """The labels that were given so far, ``other`` last if it was."""
        return tuple(self._given)

    def _bounded(self, label: str) -> str:
        if label not in self._given:
            if label != OTHER and next(self._numbers) >= self._most:
                label = OTHER
            self._given.setdefault(label)
        return label


def _pattern(template: str) -> re.Pattern[str]:
    parts = Template.parse(template).parts
    text = "".join(".+" if isinstance(part, Field) else re.escape(part) for part in parts)
    # By key= a name is the text, a colon and the key.
    return re.compile(text if ".+" in text else f"{text}:.+", re.DOTALL)


class Receivers(abc.ABC):
    """Hears of waits, holds, timeouts and losses in this process. Its receivers never wait for anything."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels

    def connect(self) -> None:
        """Hear the signals from now on. Idempotent."""
        for signal, receiver in self._wanted():
            signal.inline.connect(receiver, weak=False, dispatch_uid=(id(self), id(signal)))

    def disconnect(self) -> None:
        """Hear them no more. Idempotent."""
        for signal, _receiver in self._wanted():
            signal.inline.disconnect(dispatch_uid=(id(self), id(signal)))

    def _wanted(self) -> Iterator[tuple[signals.PermitSignal, Any]]:
        yield signals.permit_acquired, self._acquired
        yield signals.permit_released, self._released
        yield signals.acquire_timed_out, self._timed_out
        yield signals.permit_lost, self._lost
        yield signals.permit_forgotten, self._forgotten

    def _acquired(self, *, semaphore: Semaphore, permit: Any, waited: float, **_: Any) -> None:
        self.waited(self._of(semaphore), waited, semaphore.name, permit.slots)

    def _released(self, *, semaphore: Semaphore, held: float, **_: Any) -> None:
        self.held(self._of(semaphore), held)

    def _timed_out(self, *, semaphore: Semaphore, waited: float, **_: Any) -> None:
        self.timed_out(self._of(semaphore), waited, semaphore.name)

    def _lost(self, *, semaphore: Semaphore, loss: Any, **_: Any) -> None:
        if loss.reason is not LossReason.FORGOTTEN:  # which permit_forgotten tells, also without a permit
            self.lost(self._of(semaphore), loss.reason.value)

    def _forgotten(self, *, name: str, using: str, loss: Any, **_: Any) -> None:
        self.lost((using, self.labels.of_name(name)), loss.reason.value)

    def _of(self, semaphore: Semaphore) -> tuple[str, str]:
        return queries.locks_database(semaphore.using), self.labels.of(semaphore)

    @abc.abstractmethod
    def waited(self, of: tuple[str, str], seconds: float, name: str, slots: tuple[int, ...]) -> None:
        """A permit was granted after so long. ``of``: the database's alias and the label."""

    @abc.abstractmethod
    def held(self, of: tuple[str, str], seconds: float) -> None:
        """A permit was given back after so long."""

    @abc.abstractmethod
    def timed_out(self, of: tuple[str, str], seconds: float, name: str) -> None:
        """An acquire was refused after so long."""

    @abc.abstractmethod
    def lost(self, of: tuple[str, str], reason: str) -> None:
        """A permit was lost, or forgotten."""


class Standing:
    """How many slots are held and stale, and how many wait, by label: as the database says at this moment."""

    #: Names of the figures, and what they are.
    FIGURES: ClassVar = {
        "held": "Slots that are held by live permits.",
        "waiting": "Threads and tasks that wait for a slot, over all processes.",
        "stale": "Slots whose holder seems gone.",
    }

    def __init__(self, labels: Labels, using: Iterable[str | None]) -> None:
        self.labels = labels
        self.using = tuple(using)

    def look(self) -> dict[str, dict[tuple[str, str], int]]:
        """Return the figures by alias and label: 0 for a label that is not in use now. Raises ``BackendError``."""
        found: dict[str, Counter[tuple[str, str]]] = {figure: Counter() for figure in self.FIGURES}
        for using in self.using:
            alias = queries.locks_database(using)
            with _closing_what_it_opens(alias):
                for snapshot in queries.in_use(most=MOST_IN_USE, using=alias):
                    label = self.labels.of_name(snapshot.name)
                    for figure, counts in found.items():
                        counts[alias, label] += getattr(snapshot, figure)
            for label in self.labels.given:
                for counts in found.values():
                    counts[alias, label] += 0
        return {figure: dict(counts) for figure, counts in found.items()}


@contextlib.contextmanager
def _closing_what_it_opens(alias: str) -> Iterator[None]:
    """Close the connection again: an exporter's thread is not a request, at whose end Django would close it."""
    connection = connections[alias]
    open_before = connection.connection is not None
    try:
        yield
    finally:
        if not open_before and not connection.in_atomic_block:
            connection.close()
