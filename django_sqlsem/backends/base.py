"""The contract of a backend: how one database grants, keeps and shows slots."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from django_sqlsem.identity import HolderIdentity
    from django_sqlsem.naming import Resource
    from django_sqlsem.sessions import Session
    from django_sqlsem.snapshots import HolderSnapshot, Loss, SemaphoreSnapshot


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


@dataclass(frozen=True, slots=True)
class Grant:
    """What a claim got: parallel tuples of slot numbers, tokens and the rows' ids."""

    slots: tuple[int, ...]
    tokens: tuple[int, ...]
    row_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """One process's place in the queue of a name."""

    ticket: str
    #: Seconds that the process's oldest waiter has waited.
    age: float
    #: How many threads and tasks wait in the process.
    waiting: int
    #: The place must be written: it is new, or its heartbeat is due.
    refresh: bool
    #: The oldest waiter is another one than at the last refresh.
    moved: bool


@dataclass(frozen=True, slots=True)
class Waited:
    """The outcome of one step of waiting: a grant, or what is known of the queue."""

    grant: Grant | None
    #: How many processes wait longer; ``None``: not looked at in this step.
    ahead: int | None = None
    #: Seconds until the next lease runs out; ``None``: not looked at, or none is held.
    expiry_in: float | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A grant to renew or to release."""

    permit_id: str
    resource: Resource
    grant: Grant


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of the grants to renew, by permit id. One in neither could not be reached: ask again soon."""

    renewed: frozenset[str]
    lost: Mapping[str, Loss]


class BaseSemaphoreBackend(abc.ABC):
    """How one database alias grants, keeps and shows slots.

    A backend holds configuration only: it is shared by all threads, and is created anew after a fork. Methods
    that take a ``session`` run their statements there and commit before they return; any of them may raise
    ``BackendError``.
    """

    #: Does the backend live inside this process, without connections, threads and leases?
    process_local: ClassVar[bool] = False
    #: Does a grant last only as long as the database session that made it?
    released_on_disconnect: ClassVar[bool] = False
    #: Must a grant be renewed to be kept?
    supports_renewal: ClassVar[bool] = True
    #: Can it say who waits?
    reports_waiters: ClassVar[bool] = True

    def __init__(self, alias: str) -> None:
        self.alias = alias

    # The holder's side.

    @abc.abstractmethod
    def claim(self, session: Session, claim: Claim) -> Grant | None:
        """Atomically take ``claim.take`` free slots, all or nothing, without waiting.

        A fair claim takes nothing while any live process waits. A name seen for the first time is created.
        Raises ``ImproperlyConfigured`` if the name is another kind of lock.
        """

    @abc.abstractmethod
    def wait(self, session: Session, claim: Claim, place: Place) -> Waited:
        """Take one step of waiting: keep the place in the queue, and claim if nobody older waits."""

    @abc.abstractmethod
    def leave(self, session: Session, ticket: str) -> None:
        """Give up a place in the queue. Idempotent."""

    @abc.abstractmethod
    def release(self, session: Session, held: Held) -> bool:
        """Atomically free the slots that still carry this very permit. Return whether any did. Idempotent."""

    @abc.abstractmethod
    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        """Free whatever a claim whose outcome is unknown may have got. Return whether it had got any. Idempotent."""

    @abc.abstractmethod
    def renew(self, session: Session, held: Sequence[Held]) -> Renewal:
        """Extend all these grants by their leases, in one statement."""

    @abc.abstractmethod
    def snapshot(self, session: Session, resource: Resource) -> SemaphoreSnapshot | None:
        """Return what one name is like now, read on ``session``; ``None`` if nobody has used it yet."""

    # What a process-local backend tells, as nothing else does; the others have leases, and clean tables.

    def taken_away(self, held: Held) -> Loss | None:
        """Return how a grant that needs no renewal was taken away, or ``None`` if it still stands."""
        return None

    def listen(self, changed: Callable[[], object]) -> None:  # noqa: B027 - only some have something to tell
        """Have ``changed`` called when an operator has done something that may let waiters in."""

    def emptied(self) -> None:  # noqa: B027 - most keep their locks in the tables
        """Forget all locks: a test has emptied the tables."""

    # The operator's side. It runs on the alias's ordinary connection.

    @abc.abstractmethod
    def inspect(self, names: Collection[str] | None = None, *, prefix: str = "") -> list[SemaphoreSnapshot]:
        """Return snapshots, ordered by name: of ``names`` if given, else of all names that begin with ``prefix``."""

    @abc.abstractmethod
    def revoke(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        """Atomically take a slot away from the holder with this token. ``None`` if it is no longer the holder."""

    @abc.abstractmethod
    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        """Atomically free a slot whose lease has run out and still carries this token. Never touches a live one."""

    @abc.abstractmethod
    def purge_idle(self, name: str) -> bool:
        """Atomically delete a name that nobody holds or waits for. Return whether it was deleted."""

    @abc.abstractmethod
    def set_slots(self, name: str, slots: int | None) -> bool:
        """Set the operator's number (``None``: leave it to the code). Return ``False`` if there is no such name."""

    @abc.abstractmethod
    def set_paused(self, name: str, paused: bool) -> bool:
        """Stop or resume granting; holders are not disturbed. Return ``False`` if there is no such name."""
