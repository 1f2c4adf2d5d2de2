"""``claim()``: rows of any model, each taken by one worker through a status column, and given back if that dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.models import Manager, Model, QuerySet
from django.db.models.manager import BaseManager
from django.db.models.query import ModelIterable

from django_sqlsem.backends import database_for
from django_sqlsem.claims.block import Claim
from django_sqlsem.claims.rows import CLAIM_KIND, give_back_abandoned, refuse_atomic, status_column
from django_sqlsem.core.durations import Seconds
from django_sqlsem.core.names import validate_slots
from django_sqlsem.core.text import shown
from django_sqlsem.database.server import is_per_tenant
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import semaphore

__all__ = ["Claim", "claim", "recover"]

M = TypeVar("M", bound=Model)


def claim(
    queryset: QuerySet[M] | Manager[M],
    from_status: Any = "Not Started",
    status: Any = "Calculating",
    done: Any = "Calculated",
    field: str = "status",
    n: int = 1,
    *,
    workers: int = 100,
    timeout: Seconds | None = 0,
    lease: Seconds | None = None,
    on_lost: Callable[[Permit], object] | None = None,
    using: str | None = None,
) -> Claim[M]:
    """Return a claim, for one ``with`` or ``async with`` block, of up to ``n`` rows whose status is ``from_status``.

    The block gets them with the status ``status``, or gets none, at once; rows that others have locked are passed
    over. At its end they get the status ``done``. If it raises, or its process dies or loses its permit, they get
    ``from_status`` back. ``field``: the name of the status column. ``n``: 1 to 10,000 rows of ``queryset``, in its
    order. ``workers``: how many blocks may be at work at once on this column (1 to 10,000); ``timeout``: seconds or
    ``timedelta`` to wait for one of them to end, ``None`` for ever. ``lease``: seconds that a claim outlives its
    process, at the most. ``on_lost``: called with the permit if it is lost. ``using``: alias of the database that
    keeps the locks, which must be the one that has the rows.

    Raises ``TypeError`` or ``ValueError`` for a bad argument, and ``ImproperlyConfigured`` for another database.
    Entering the block raises ``AcquireTimeoutError`` if all workers are busy, ``TransactionManagementError`` inside
    ``atomic()``, and ``BackendError``; leaving it raises ``PermitLostError`` or ``BackendError``.
    """
    rows = _rows(queryset)
    column = status_column(rows.model, field)
    before = column.value(from_status, what="from_status")
    meanwhile = column.value(status, what="status")
    after = column.value(done, what="done")
    for what, other in (("from_status", before), ("done", after)):
        if column.text(other) == column.text(meanwhile):
            raise ValueError(f"status and {what} must differ, and are both {shown(other)}.")
    n = validate_slots(n, what="n")
    workers = validate_slots(workers, what="workers")
    alias = _alias(rows, using)
    return Claim(
        rows.using(alias).filter(**{column.field.attname: before}),
        column,
        semaphore(column.name, workers, timeout=timeout, lease=lease, on_lost=on_lost, using=alias)._as(CLAIM_KIND),
        n=n,
        from_status=before,
        status=meanwhile,
        done=after,
    )


def recover(
    queryset: QuerySet[Any] | Manager[Any] | type[Model], field: str = "status", *, using: str | None = None
) -> list[Any]:
    """Give back the claimed rows of a model whose worker is gone, whatever the queryset's filters.

    Every ``claim()`` does so by itself; this is for a cron job, or an operator. A killed process is found dead by two
    looks that are at least 1.5 seconds apart. Returns the primary keys of what was given back. Raises as ``claim()``.
    """
    if isinstance(queryset, type) and issubclass(queryset, Model):
        queryset = QuerySet(queryset)
    rows = _rows(queryset)
    column = status_column(rows.model, field)
    alias = _alias(rows, using)
    refuse_atomic(connections[alias], "recover()")
    return give_back_abandoned(semaphore(column.name, using=alias)._as(CLAIM_KIND)._keeper(), column)


def _rows(queryset: object) -> QuerySet[Any]:
    if isinstance(queryset, BaseManager):
        queryset = queryset.all()
    if not isinstance(queryset, QuerySet):
        raise TypeError(f"claim() takes a queryset or a manager, not {shown(queryset)}.")
    if not issubclass(queryset._iterable_class, ModelIterable):
        raise TypeError("claim() takes a queryset of model instances, not one of values().")
    if queryset.query.is_sliced:
        raise ValueError("claim() takes a queryset that is not sliced: say how many rows by n=.")
    if queryset.query.combinator:
        raise ValueError(f"claim() can't take rows of a {queryset.query.combinator}(): filter one queryset instead.")
    rows = queryset.all()
    rows.query.select_for_update = False  # the claim locks what it takes itself
    return rows


def _alias(rows: QuerySet[Any], using: str | None) -> str:
    asked: Any = rows
    alias: str = asked._db or router.db_for_write(rows.model, **asked._hints)
    locks = database_for(using)
    if locks != alias:
        raise ImproperlyConfigured(
            f"claim() needs the locks in the database of the rows, to write both in one transaction: the rows of "
            f"{rows.model._meta.label} are in {alias!r}, the locks in {locks!r}. Where {alias!r} has the lock tables "
            f"too, give using={alias!r}."
        )
    if is_per_tenant(connections[alias], rows.model._meta.app_label):
        raise ImproperlyConfigured(
            f"claim() can't take rows of {rows.model._meta.label}, which each tenant has in a schema of its own: claims"
            " name rows by model and primary key, and would take those of another tenant for them."
        )
    return alias
