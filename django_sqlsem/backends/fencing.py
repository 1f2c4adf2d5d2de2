"""The part of a backend's contract that fences the caller's own transactions and statements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_sqlsem.exceptions import SemaphoreError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import Held
    from django_sqlsem.sessions import Session
    from django_sqlsem.snapshots import Loss


class Fencing:
    """What a backend without rows that tell who holds what cannot do. A backend that can overrides all of it."""

    def fence(self, caller: BaseDatabaseWrapper, session: Session, held: Held) -> bool:
        """Keep the slots from being taken until the caller's transaction ends. Return whether the permit is live.

        ``session`` is one of our own. Raises ``BackendError``, and ``SemaphoreError`` where there are no fences.
        """
        raise _no_fences(caller)

    def keeps_renewals_out(self, caller: BaseDatabaseWrapper) -> bool:
        """Whether a fenced transaction keeps all others from writing, so that it must renew the permit itself."""
        return False

    def extend(self, caller: BaseDatabaseWrapper, held: Held) -> bool:
        """Renew the permit inside such a transaction, just before it commits. Return whether it was."""
        return False

    def fate(self, session: Session, held: Held) -> Loss | None:
        """Return how a grant was lost, by the database's word; ``None``: it was not, or nobody knows."""
        return None

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Held) -> tuple[str, list[Any]]:
        """Return a condition, for a statement on ``caller``, that the permit is live, and its parameters."""
        raise _no_fences(caller)


def _no_fences(caller: BaseDatabaseWrapper) -> SemaphoreError:
    return SemaphoreError(
        f"Fences need lock rows, and the locks on {caller.alias!r} are not rows: compare permit.token instead."
    )
