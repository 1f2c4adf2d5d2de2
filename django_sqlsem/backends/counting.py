"""What a backend can do besides that keeps a count of tokens: see ``tokens()``.

A claim of the kind ``tokens`` waits like any other. Its ``slots`` are the tokens that a new name begins with, and its
grant lasts for a moment only: then it has been taken for good, or goes back.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Granted, Presence
    from django_sqlsem.naming import Resource
    from django_sqlsem.sessions import Session

#: The kind of lock that is a count.
TOKENS: Final = "tokens"


class Counting(abc.ABC):
    """A backend that keeps counts of tokens."""

    @abc.abstractmethod
    def add(
        self,
        session: Session,
        resource: Resource,
        count: int,
        *,
        initial: int,
        presence: Presence,
        hand_on: bool = True,
    ) -> tuple[Granted, ...]:
        """Add tokens, and hand them to waiters; returns those of this very process.

        ``initial``: what a new name begins with. ``hand_on``: false inside a transaction that is not ours. After a
        ``BackendError`` of a connection that broke at the commit, it is not known whether they were added.
        """

    @abc.abstractmethod
    def take(self, session: Session, permit_id: str) -> bool:
        """Take what was granted for good. Return whether it still was there to take."""
