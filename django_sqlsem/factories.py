"""``semaphore()`` and ``mutex()``: every argument is checked here, at the call that gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django_sqlsem.conf import MIN_LEASE
from django_sqlsem.naming import Name, part_texts, validate_name, validate_slots
from django_sqlsem.permits import Permit
from django_sqlsem.semaphores import RELEASE_POLICIES, Semaphore
from django_sqlsem.timeouts import UNSET, Seconds, Unset, to_seconds
from django_sqlsem.wording import shown

if TYPE_CHECKING:
    from django_sqlsem.busy import OnBusy


def semaphore(
    name: Name,
    slots: int | None = None,
    *,
    take: int = 1,
    timeout: Seconds | Unset | None = UNSET,
    lease: Seconds | None = None,
    on_busy: OnBusy | None = None,
    key: Callable[..., Any] | None = None,
    release: str = "on_exit",
    fair: bool = True,
    max_hold: Seconds | None = None,
    durable: bool | None = None,
    on_lost: Callable[[Permit], object] | None = None,
    using: str | None = None,
) -> Semaphore:
    """Return the semaphore ``name``: a decorator, a context manager and its verbs in one.

    ``name``: 1 to 200 characters, or a tuple of parts. ``slots``: how many may hold at once (1 to 10,000); omitted, as
    declared elsewhere, else 1. ``take``: how many slots one permit takes, all or nothing. ``timeout``: seconds or
    ``timedelta`` to wait, ``None`` for ever, 0 not at all; omitted, a view waits 5 s, a Celery task 0 s, anything else
    30 s. ``lease``: seconds that a grant outlives its process. ``on_busy``: what a decorator does when no slot is free:
    a status from 400 to 599, ``"raise"``, ``"skip"``, ``"retry"`` or a callable that gets a ``Busy``. ``key``: a
    callable that gets the decorated function's arguments and returns what is appended to the name. ``release``:
    ``"on_exit"`` or ``"on_commit"``. ``fair``: first come, first served; ``False`` barges. ``max_hold``: seconds after
    which the permit is taken for forgotten. ``durable``: whether a grant must survive a crash of the database's server,
    or is faster; omitted, as ``SQLSEM["DURABLE"]`` says. ``on_lost``: called with a permit that was lost. ``using``:
    alias of the database that keeps the locks.

    Nothing is looked up before the first acquire. Raises ``TypeError`` or ``ValueError`` for a bad argument.
    """
    from django_sqlsem.busy import validate_on_busy

    parts = part_texts(name) if isinstance(name, tuple) else None
    name = validate_name(name)
    if slots is not None:
        slots = validate_slots(slots)
    take = validate_slots(take, what="take")
    if slots is not None and take > slots:
        raise ValueError(f"take must be at most slots={slots}, not {take}: it could never be met.")
    if not isinstance(timeout, Unset):
        timeout = to_seconds(timeout, what="timeout", allow_none=True)
    for what, function in (("key", key), ("on_lost", on_lost)):
        if function is not None and not callable(function):
            raise TypeError(f"{what} must be a callable or None, not {shown(function)}.")
    if release not in RELEASE_POLICIES:
        raise ValueError(f"release must be {' or '.join(map(repr, RELEASE_POLICIES))}, not {shown(release)}.")
    if not isinstance(fair, bool):
        raise TypeError(f"fair must be True or False, not {shown(fair)}.")
    if durable is not None and not isinstance(durable, bool):
        raise TypeError(f"durable must be True, False or None, not {shown(durable)}.")
    if using is not None and not isinstance(using, str):
        raise TypeError(f"using must be the alias of a database or None, not {shown(using)}.")
    validate_on_busy(on_busy)
    return Semaphore(
        name,
        slots,
        take=take,
        timeout=timeout,
        lease=None if lease is None else to_seconds(lease, what="lease", minimum=MIN_LEASE),
        on_busy=on_busy,
        key=key,
        release_policy=release,
        fair=fair,
        max_hold=None if max_hold is None else to_seconds(max_hold, what="max_hold", minimum=MIN_LEASE),
        durable=durable,
        on_lost=on_lost,
        using=using,
        parts=parts,
    )


def mutex(name: Name, **options: Any) -> Semaphore:
    """Return the mutex ``name``: a semaphore with one slot, and a kind of its own.

    Takes the options of ``semaphore()`` but ``slots`` and ``take``.
    """
    return one_slot("mutex", name, options)


def one_slot(kind: str, name: Name, options: dict[str, Any]) -> Semaphore:
    """Return a semaphore with one slot, of its own kind. Raises ``TypeError`` for options that would say otherwise."""
    for option in ("slots", "take"):
        if option in options:
            raise TypeError(f"A {kind} has one slot: {option}={shown(options[option])} is not for it; use semaphore().")
    return semaphore(name, 1, **options)._as(kind)
