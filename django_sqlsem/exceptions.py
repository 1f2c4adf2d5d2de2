"""Every exception of the package. An exception's docstring is its default message."""

from __future__ import annotations

import datetime
import glob
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from django_sqlsem.core.text import a_kind, shell_quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_sqlsem.snapshots import DeadlockSnapshot, HolderSnapshot, Loss, SemaphoreSnapshot


class SemaphoreError(Exception):
    """A semaphore could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class AcquireTimeoutError(SemaphoreError, TimeoutError):
    """No slot became free within the timeout."""

    #: What the semaphore was like then.
    _snapshot: SemaphoreSnapshot | None = None

    def __init__(
        self,
        message: str | None = None,
        *,
        name: str = "",
        timeout: float | None = None,
        holders: Sequence[HolderSnapshot] = (),
        waiting: int = 0,
        retry_after: float = 1.0,
        reason: str = "full",
    ) -> None:
        super().__init__(message)
        #: ``full``: all slots were taken; ``paused``: by an operator; ``queue full``: too many wait already.
        self.reason = reason
        self.name = name
        self.timeout = timeout
        self.holders = tuple(holders)
        self.waiting = waiting
        self.retry_after = retry_after


class PermitLostError(SemaphoreError):
    """The permit is no longer ours: it expired, was revoked, or its session ended."""

    def __init__(self, message: str | None = None, *, loss: Loss | None = None) -> None:
        super().__init__(message)
        self.loss = loss


class AlreadyHeldError(SemaphoreError):
    """You have acquired this semaphore already, in this very thread or task."""


class NotEnteredError(SemaphoreError, RuntimeError):
    """You are not inside this lock: only the thread or task that entered it may leave it."""


class DeadlockError(SemaphoreError):
    """This caller was chosen to break a deadlock; what it asked for is not held."""

    def __init__(self, message: str | None = None, deadlock: DeadlockSnapshot | None = None) -> None:
        super().__init__(message)
        #: Who waited for whom; ``None`` if it was the database that chose.
        self.deadlock = deadlock


class BackendError(SemaphoreError):
    """The database failed; the driver's own error is in ``__cause__``."""

    #: The connection had died earlier, unnoticed: the same call on a new one may well succeed.
    stale_connection = False
    #: The database is away for a reason that is likely to pass; the log has one line about that, not one for each call.
    outage = False


class FencedError(BackendError):
    """The slot can't be taken from its holder now: a transaction that is fenced with its permit is open."""


class KillNeededError(SemaphoreError):
    """The lock belongs to a database session: only ending that session frees it."""


class InvalidSemaphoreBackendError(ImproperlyConfigured):
    """The semaphore backend could not be imported."""


def wrong_kind(
    name: str, kind: str, wanted: str, alias: str, known: SemaphoreSnapshot | None = None
) -> ImproperlyConfigured:
    """Return the error for a name that is another kind of lock already; ``known``: how it stands, if that was read."""
    database = "" if alias == "default" else f" --database {alias}"
    purge = f"`manage.py locks purge --idle --name {shell_quoted(glob.escape(name))}{database}` frees the name"
    if known is None:
        way_out = f"Once nobody uses it, {purge}."
    elif known.waiters or any(not holder.expired for holder in known.holders):
        way_out = f"It is in use now: give one of the two another name; or, once nobody uses it, {purge}."
    else:
        last = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=known.idle or 0.0)
        since = "" if known.idle is None else f", and nobody has taken it since {last:%Y-%m-%d %H:%M} UTC"
        way_out = f"Nobody holds it{since}: {purge}."
    return ImproperlyConfigured(f"{name!r} is {a_kind(kind)} already and can't be used as {a_kind(wanted)}. {way_out}")


def not_installed() -> ImproperlyConfigured:
    """Return the error for a project that uses locks and has not installed the app."""
    return ImproperlyConfigured("Locks need tables: add 'django_sqlsem' to INSTALLED_APPS, and run manage.py migrate.")


def kill_needed(holder: HolderSnapshot) -> KillNeededError:
    """Return the error for a slot that only the end of its holder's session frees."""
    where = f"Slot {holder.slot} of {holder.name!r} is held by"
    if holder.session_id is None:
        return KillNeededError(f"{where} a program that keeps no row: end its database session by hand.")
    return KillNeededError(
        f"{where} database session {holder.session_id}: only ending that session frees it, and whatever else it"
        " holds. Give --kill (in code: kill=True) to do that."
    )


def fenced(name: str, slot: int) -> FencedError:
    """Return the error for a slot that an open transaction keeps."""
    return FencedError(
        f"Slot {slot} of {name!r} can't be revoked now: a transaction that is fenced with its permit is open. Try again"
        " when that has ended."
    )


def never_met(name: str, slots: int, take: int) -> SemaphoreError:
    """Return the error for a claim of more slots than there are."""
    return SemaphoreError(f"{name!r} has {slots} slot{'' if slots == 1 else 's'}: take={take} can never be met.")
