"""What metrics call a semaphore: few labels, however many names there are."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from django_sqlsem.name_templates import Field, Template

if TYPE_CHECKING:
    from django_sqlsem.semaphores import Semaphore

#: The label of all that came after the most that there may be.
OTHER: Final = "other"
MOST: Final = 100

_lock = threading.Lock()


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
        for template in [templates] if isinstance(templates, str) else templates:
            self.learn(template)

    def learn(self, template: str) -> None:
        """Know the names that a template makes. Raises ``ValueError`` for what is no template."""
        if template not in self._patterns and len(self._patterns) < self._most:
            self._patterns = {**self._patterns, template: _pattern(template)}

    def of(self, semaphore: Semaphore) -> str:
        """Return the label of a semaphore."""
        if self._label is None and semaphore.template:
            self.learn(semaphore.template)
            return self._bounded(semaphore.template)
        return self.of_name(semaphore.name)

    def of_name(self, name: str) -> str:
        """Return the label of a name."""
        if self._label is not None:
            return self._bounded(str(self._label(name)))
        found = next((template for template, pattern in self._patterns.items() if pattern.fullmatch(name)), name)
        return self._bounded(found)

    @property
    def given(self) -> tuple[str, ...]:
        """The labels that were given so far, ``other`` last if it was."""
        return tuple(self._given)

    def _bounded(self, label: str) -> str:
        if label in self._given:
            return label
        with _lock:
            if label not in self._given and label != OTHER and len(self._given) >= self._most:
                label = OTHER
            self._given.setdefault(label)
        return label


def _pattern(template: str) -> re.Pattern[str]:
    parts = Template.parse(template).parts
    text = "".join(".+" if isinstance(part, Field) else re.escape(part) for part in parts)
    # By key= a name is the text, a colon and the key.
    return re.compile(text if ".+" in text else f"{text}:.+", re.DOTALL)


def _after_fork() -> None:
    """In a forked child: another thread of the parent may have had the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
