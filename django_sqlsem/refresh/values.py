"""Where refreshed values are kept: in Django's cache, or in a field of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.cache import InvalidCacheBackendError, caches
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db import connections, router, transaction
from django.db.models import Model, QuerySet

from django_sqlsem.core import testmode
from django_sqlsem.core.names import Resource
from django_sqlsem.core.text import shown
from django_sqlsem.database.sessions import CallerSession, Session
from django_sqlsem.exceptions import SemaphoreError

logger = logging.getLogger("django_sqlsem")

#: Writes the row of a value, in the transaction of a session. Returns whether the value counts.
Stamp: TypeAlias = Callable[[Session], bool]


class Missing:
    """The type of ``MISSING``: there is no value, which ``None`` is."""


MISSING: Final = Missing()


@dataclass(frozen=True)
class CacheValues:
    """Values in Django's cache. An entry is never overwritten: its key has the token under which it was built."""

    cache: str
    #: When the permit of a build is given back: see ``semaphore(release=...)``.
    release_policy: str = "on_exit"

    def check(self, alias: str) -> None:
        """Raise ``ImproperlyConfigured`` for a cache that is not there, or that each process has for itself."""
        try:
            cache = caches[self.cache]
        except InvalidCacheBackendError:
            raise ImproperlyConfigured(
                f"cache is {self.cache!r}, which is not in CACHES: {', '.join(sorted(caches.settings))}."
            ) from None
        # A project's own subclass may well share its entries.
        if type(cache) in (LocMemCache, DummyCache) and not (settings.DEBUG or testmode.active()):
            raise ImproperlyConfigured(
                f"refresh_every() can't keep values in CACHES[{self.cache!r}]: with {type(cache).__name__} each "
                "process would have its own. Use a cache that processes share, such as DatabaseCache or RedisCache, or "
                "field=(Model.objects.filter(...), 'field')."
            )

    def get(self, resource: Resource, token: int) -> Any:
        """Return the value that was built under ``token``, or ``MISSING``."""
        entry = caches[self.cache].get(_entry(resource, token))
        return MISSING if entry is None else entry[0]

    async def aget(self, resource: Resource, token: int) -> Any:
        """Return the value, from a coroutine."""
        entry = await caches[self.cache].aget(_entry(resource, token))
        return MISSING if entry is None else entry[0]

    def put(self, session: Session, resource: Resource, token: int, value: Any, stamp: Stamp) -> bool:
        """Keep a value and ``stamp`` its row, or neither. Return whether the value counts.

        First the entry, which nobody knows of, and then the row that names its token.
        """
        cache, entry = caches[self.cache], _entry(resource, token)
        cache.set(entry, (value,), timeout=None)  # many caches go by the clocks of hosts, which may be wrong
        counts = False
        try:
            counts = stamp(session)
        finally:
            if not counts:
                cache.delete(entry)
        if counts and cache.get(entry) is None and not isinstance(cache, DummyCache):
            message = "CACHES[%r] did not keep the value of %r: it is built anew each time."
            extra = {"semaphore": resource.name, "what": "refresh_not_kept"}
            logger.warning(message, self.cache, resource.name, extra=extra)
        return counts

    def drop(self, resource: Resource, token: int) -> None:
        """Keep a value no longer that does not count any more."""
        caches[self.cache].delete(_entry(resource, token))


def _entry(resource: Resource, token: int) -> str:
    return f"sqlsem:refresh:{resource.key}:{token}"


@dataclass(frozen=True)
class FieldValues:
    """Values in one field of one row, written in the transaction of the caller, in which the value was built."""

    rows: QuerySet[Any]
    field: str
    # Nobody else may build before others can see the value.
    release_policy: str = "on_commit"

    @classmethod
    def of(cls, field: object) -> FieldValues:
        """Check ``field=(Model or queryset, "field")``. Raises ``TypeError`` or ``ValueError``."""
        what = "field must be (Model, 'name') or (queryset, 'name')"
        if not isinstance(field, tuple) or len(field) != 2:
            raise TypeError(f"{what}, not {shown(field)}.")
        source, name = field
        if isinstance(source, type) and issubclass(source, Model):
            source = source._default_manager.all()
        if not isinstance(source, QuerySet) or not isinstance(name, str):
            raise TypeError(f"{what}, not {shown(field)}.")
        try:
            concrete = source.model._meta.get_field(name).concrete
        except FieldDoesNotExist:
            concrete = False
        if not concrete:
            raise ValueError(f"{source.model.__name__} has no column {name!r} to keep a value in.")
        return cls(source, name)

    def check(self, alias: str) -> None:
        """Raise ``ImproperlyConfigured`` if the field is in another database than the locks."""
        found = self._rows().db
        if found != alias:
            raise ImproperlyConfigured(
                f"{self.rows.model.__name__}.{self.field} is written in the database {found!r}, and the locks are in "
                f"{alias!r}: one transaction must write both. Give using={found!r}, or keep the value in a cache."
            )

    def get(self, resource: Resource, token: int) -> Any:
        found = list(self._rows().values_list(self.field, flat=True)[:1])
        return found[0] if found else MISSING

    async def aget(self, resource: Resource, token: int) -> Any:
        return await sync_to_async(self.get)(resource, token)

    def put(self, session: Session, resource: Resource, token: int, value: Any, stamp: Stamp) -> bool:
        """Stamp and write in one transaction, or in the caller's. Raises ``SemaphoreError`` unless there is one row."""
        rows = self._rows()
        with transaction.atomic(using=rows.db):
            if not stamp(CallerSession(connections[rows.db])):
                return False
            written = rows.update(**{self.field: value})
            if written != 1:
                raise SemaphoreError(
                    f"field= of {resource.name!r} must mean one row of {self.rows.model.__name__}, not {written}."
                )
        return True

    def drop(self, resource: Resource, token: int) -> None:
        """There is one field, which has been written over."""

    def _rows(self) -> QuerySet[Any]:
        chosen: str | None = vars(self.rows)["_db"]
        return self.rows.using(chosen or router.db_for_write(self.rows.model))


#: A place where values are kept.
Values: TypeAlias = CacheValues | FieldValues
