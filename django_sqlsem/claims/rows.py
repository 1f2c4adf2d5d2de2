"""The short transactions of claims: a row's status and its owner are written together, and only if both are in order.

Each but the first begins with the ownership row: who deletes it, by its token, decides what becomes of the status.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Field, Model, QuerySet

from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.identity import current
from django_sqlsem.core.names import MAX_NAME_LENGTH, Resource, resource_for
from django_sqlsem.core.text import shown
from django_sqlsem.database import errors, transactions
from django_sqlsem.database.cursors import AnyCursor
from django_sqlsem.database.dialects import DatabaseNow, dialect_for
from django_sqlsem.exceptions import BackendError
from django_sqlsem.models import ClaimRow
from django_sqlsem.runtime.keeper import Keeper

logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")

#: How often rows are looked for anew, because others took all that were found.
_TRIES: Final = 100
_WRITE_FIRST: Final = "DELETE FROM sqlsem_claim WHERE id < 0"
# Not with the ORM: SQL Server would scan a small table, and wait for the rows of others.
_FORGET: Final = "DELETE FROM sqlsem_claim WHERE semaphore_key = %(key)s AND object_pk = %(object_pk)s"
_OWN: Final = f"{_FORGET} AND slot = %(slot)s AND token = %(token)s"


class Outcome(Enum):
    """What became of one row."""

    WRITTEN = "written"
    #: Its status, or the row itself, is no longer what the claim left: someone else's will counts.
    CHANGED = "changed"
    #: Somebody else has the row, or it was given back.
    NOT_OURS = "not ours"


def looking(alias: str) -> contextlib.AbstractContextManager[None]:
    """Return a block in which reading waits for nobody's transaction: what it finds has to be locked, and asked again.

    SQL Server's readers would wait, unless READ_COMMITTED_SNAPSHOT is on.
    """
    return dialect_for(connections[alias]).isolated(connections[alias], "READ UNCOMMITTED")


def in_short_transaction(alias: str, work: Callable[[AnyCursor], T], *, locking: bool = False) -> T:
    """Call ``work`` in a transaction of the calling thread's connection, again if it lost a deadlock
    or the connection had died.

    Inside the caller's own transaction it is a part of that, and runs once. ``locking``: it passes over locked rows,
    which SQL Server does at this level. Raises ``BackendError``.
    """
    connection = connections[alias]
    dialect = dialect_for(connection)
    alone = not transactions.in_transaction(connection)
    reopen = alone and not connection.in_atomic_block

    def attempt() -> T:
        nonlocal reopen
        try:
            level = dialect.isolated(connection, "READ COMMITTED") if locking else contextlib.nullcontext()
            with level, transaction.atomic(using=alias), connection.cursor() as cursor:
                if dialect.one_writer:
                    cursor.execute(_WRITE_FIRST)  # a transaction that has read first may be refused to write
                return work(cursor)
        except DatabaseError as error:
            if not (reopen and errors.is_disconnect(error)):
                raise
        reopen = False
        connection.close()  # it was idle while the work went on, and has died unnoticed
        return attempt()

    with errors.database_errors(alias):
        return errors.patiently(attempt, lambda error: alone and errors.is_transient(error))


def take(
    candidates: QuerySet[Any], column: StatusColumn, slot: int, token: int, *, n: int, from_status: Any, status: Any
) -> list[tuple[Any, ClaimRow]]:
    """Take up to ``n`` of the candidates, in their order: set their status, and note whose permit they belong to.

    Returns them with what was noted.
    """
    alias = candidates.db
    dialect = dialect_for(connections[alias])
    at_once = dialect.one_writer or (dialect.limits_locks and _lockable(candidates))

    def attempt(cursor: AnyCursor) -> tuple[list[tuple[Any, ClaimRow]], bool]:
        if at_once:
            found = _distinct(_locking(candidates)[:n], column)
        else:
            found = _one_by_one(candidates, column, n, from_status, missed)
        taken = []
        for row in found:
            mine = column.rows(alias).filter(pk=column.pk_of(row), **{column.field.attname: from_status})
            if mine.update(**{column.field.attname: status}):
                claimed = column.claim_of(row, from_status, status)
                claimed.slot, claimed.token, claimed.boot_id = slot, token, dialect.boot_id
                # Of who had the row before its status was set by hand.
                dialect.execute(cursor, _FORGET, {"key": claimed.key, "object_pk": claimed.object_pk})
                ClaimRow._default_manager.using(alias).bulk_create([claimed])  # unlike save() it sends no signals
                column.set(row, status)
                taken.append((row, claimed))
        return taken, len(found) > len(taken)

    missed: set[Any] = set()
    for _nth in range(_TRIES):
        taken, others = in_short_transaction(alias, attempt, locking=True)
        if taken or not others:
            break
    return taken


def let_go(column: StatusColumn, alias: str, endings: Iterable[tuple[ClaimRow, Any]]) -> dict[str, Outcome]:
    """End the ownership of rows, each with the status that it gets if it still has the one that the claim gave it.

    All in one short transaction. Returns the outcomes by the text of the primary key.
    """
    ordered = sorted(endings, key=lambda ending: ending[0].object_pk)
    dialect = dialect_for(connections[alias])

    def end(cursor: AnyCursor) -> dict[str, Outcome]:
        outcomes = {}
        for claimed, then in ordered:
            named = {name: getattr(claimed, name) for name in ("key", "object_pk", "slot", "token")}
            dialect.execute(cursor, _OWN, named)
            if cursor.rowcount <= 0:
                outcomes[claimed.object_pk] = Outcome.NOT_OURS
                continue
            status, pk = column.value_from(claimed.status), column.pk_from(claimed.object_pk)
            row = column.rows(alias).filter(pk=pk, **{column.field.attname: status})
            written = row.update(**{column.field.attname: then})
            outcomes[claimed.object_pk] = Outcome.WRITTEN if written else Outcome.CHANGED
        return outcomes

    return in_short_transaction(alias, end) if ordered else {}


def _lockable(candidates: QuerySet[Any]) -> bool:
    """Whether a database that locks what a query returns can do so for this one: rows must be recognisable in it."""
    query = candidates.query
    windows = any(annotation.contains_over_clause for annotation in query.annotations.values())
    return not (query.distinct or query.group_by or windows)


def _locking(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Lock the rows that are read, not those joined to them, and pass over what is locked, as far as that goes."""
    features: Any = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    of = ("self",) if features.has_select_for_update_of else ()
    return rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked, of=of)


def _one_by_one(
    candidates: QuerySet[Any], column: StatusColumn, n: int, from_status: Any, missed: set[Any]
) -> list[Any]:
    """Look for candidates without locks, and lock each that is to be taken by its key.

    For databases that lock more than a query returns, and queries whose rows can't be locked. ``missed``: those that
    were locked by others, or had ceased to be candidates; they are not looked at again.
    """
    all_rows: QuerySet[Any] = QuerySet(candidates.model, using=candidates.db)
    plain = _locking(all_rows.filter(**{column.field.attname: from_status}))
    while True:
        found = candidates.exclude(pk__in=missed) if missed else candidates
        with looking(candidates.db):
            keys = dict.fromkeys(found.values_list("pk", flat=True)[: n + 20])
        if not keys:
            return []
        locked: list[Any] = []
        for key in keys:
            if len(locked) == n:
                break
            (locked.append if list(plain.filter(pk=key)) else missed.add)(key)
        # Only now are they safe from others: are they still what is asked for?
        rows = _distinct(candidates.filter(pk__in=locked), column) if locked else []
        if rows:
            return rows
        missed.update(locked)


def _distinct(rows: QuerySet[Any], column: StatusColumn) -> list[Model]:
    """Return the rows, each once: a join may bring one several times."""
    return list({column.pk_text(row): row for row in rows}.values())


def refuse_atomic(connection: BaseDatabaseWrapper, what: str) -> None:
    """Raise if the caller is inside a transaction: nobody would see the claim, and a rollback would undo it."""
    if transactions.in_transaction(connection):
        raise transaction.TransactionManagementError(
            f"{what} inside a transaction of {connection.alias!r}: others would not see the row's status before its "
            "commit. Call it outside atomic() (in a view under ATOMIC_REQUESTS, use non_atomic_requests)."
        )


CLAIM_KIND: Final = "claim"
_MAX_TEXT: Final = 255


@dataclass(frozen=True)
class StatusColumn:
    """One column of the table that has it: a proxy's, or a child's, is its parent's."""

    model: type[Model]
    field: Field[Any, Any]

    @property
    def name(self) -> str:
        """The name of the semaphore whose slots the workers on this column hold."""
        text = f"claim:{self.model._meta.db_table}.{self.field.column}"
        if len(text) <= MAX_NAME_LENGTH:
            return text
        return f"{text[:160]}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    @property
    def resource(self) -> Resource:
        """What the locks database calls it."""
        return resource_for(self.name, CLAIM_KIND)

    def rows(self, alias: str) -> QuerySet[Any]:
        """Return all rows of the table, whatever the model's managers leave out."""
        return QuerySet(self.model, using=alias)

    def set(self, row: Model, value: Any) -> None:
        """Set the status of an instance, in memory only."""
        setattr(row, self.field.attname, value)

    def claim_of(self, row: Model, from_status: Any, status: Any) -> ClaimRow:
        """Return what is noted of a row that is taken by this thread or task."""
        who = current()
        return ClaimRow(
            key=self.resource.key,
            model=self.model._meta.label,
            field=self.field.name,
            object_pk=self.pk_text(row),
            from_status=self.text(from_status),
            status=self.text(status),
            claimed_us=DatabaseNow(),
            host=who.host,
            pid=who.pid,
            thread=who.thread,
            label=who.label,
        )

    def pk_of(self, row: Model) -> Any:
        """Return the primary key, in the table that has the column, of an instance of its model or of a child's."""
        return getattr(row, self._pk.attname)

    def pk_text(self, row: Model) -> str:
        """Return that key as text. Raises ``ValueError`` if it is too long."""
        text = str(self._pk.value_to_string(row))
        if len(text) > _MAX_TEXT:
            raise ValueError(f"A primary key may have up to {_MAX_TEXT} characters to be claimed, not {shown(text)}.")
        return text

    def pk_from(self, text: str) -> Any:
        """Return the key that a text stands for."""
        return self._pk.to_python(text)

    def value(self, value: object, *, what: str) -> Any:
        """Return ``value`` as the field has it. Raises ``ValueError`` that says why the field can't take it."""
        try:
            python = self.field.to_python(value)
            if python is None and not self.field.null:
                raise ValidationError("it must not be null")
            choices = [key for key, _label in self.field.flatchoices or ()]
            if choices and python not in choices:
                raise ValidationError(f"its choices are {', '.join(map(shown, choices))}")
            self.field.run_validators(python)
            if len(self.text(python) or "") > _MAX_TEXT:
                raise ValidationError(f"a status may have up to {_MAX_TEXT} characters")
        except ValidationError as error:
            reason = "; ".join(map(str, error.messages)).rstrip(".")
            raise ValueError(f"{what}={shown(value)} is no value of {self}: {reason}.") from None
        return python

    def text(self, value: Any) -> str | None:
        """Return a status as text."""
        if value is None:
            return None
        row: Any = SimpleNamespace(**{self.field.attname: value})
        return str(self.field.value_to_string(row))

    def value_from(self, text: str | None) -> Any:
        """Return the status that a text stands for."""
        return None if text is None else self.field.to_python(text)

    @property
    def _pk(self) -> Field[Any, Any]:
        found: Field[Any, Any] = self.model._meta.pk
        return found

    def __str__(self) -> str:
        return f"{self.model._meta.label}.{self.field.name}"


def status_column(model: type[Model], field: object) -> StatusColumn:
    """Return a model's status column. Raises ``TypeError`` or ``ValueError`` that names the fields it could be."""
    if not isinstance(field, str):
        raise TypeError(f"field must be the name of a field, not {shown(field)} of type {type(field).__name__}.")
    found: Any = None
    with contextlib.suppress(FieldDoesNotExist):
        found = model._meta.get_field(field)
    if not isinstance(found, Field) or found.column is None or found.primary_key or found.many_to_many:
        names = [each.name for each in model._meta.concrete_fields if not each.primary_key]
        raise ValueError(f"field must be a column of {model._meta.label}, one of {', '.join(names)}, not {field!r}.")
    owner = found.model._meta.concrete_model
    assert owner is not None  # noqa: S101 - only abstract models have none
    return StatusColumn(owner, found)


# Rows whose worker is gone: the next worker finds them, and gives them back.

#: How often a process that claims looks for rows whose worker is gone, in seconds: at first, and at the least.
_LOOK_EVERY: Final = 1.0
SELDOM: Final = 5.0
#: Of this many workers each looks a little less often, since they see for one another.
_MANY: Final = 4
#: For how long it waits for the keeper to look, in seconds: it opens a connection first.
_PATIENCE: Final = 30.0
_looked: dict[tuple[str, str], float] = {}


def is_due(keeper: Keeper, key: str) -> bool:
    """Whether it is time to look again; counts as having looked."""
    now, place = boot_now(), (keeper.alias, key)
    # What is kept inside the process is looked at in no time.
    if not keeper.backend.process_local and now < _looked.get(place, 0.0):
        return False
    _looked[place] = now + _LOOK_EVERY
    return True


def give_back_abandoned(keeper: Keeper, column: StatusColumn) -> list[Any]:
    """Give back the rows of a column whose worker is gone. Returns their primary keys. Raises ``BackendError``."""
    alias, resource = keeper.alias, column.resource
    # Read before the permits: a row is only ever owned by a permit that was granted before.
    with errors.database_errors(alias), looking(alias):
        rows = list(ClaimRow.objects.using(alias).filter(key=resource.key))
    if not rows:
        return []
    workers = len({row.slot for row in rows})
    _looked[alias, resource.key] = boot_now() + min(SELDOM, _LOOK_EVERY * max(1.0, workers / _MANY))

    held = _standing(keeper, resource)
    gone = {row.object_pk: row for row in rows if (row.slot, row.token) not in held and _is_readable(column, row)}
    outcomes = let_go(column, alias, [(row, column.value_from(row.from_status)) for row in gone.values()])
    back = []
    for object_pk, outcome in outcomes.items():
        row = gone[object_pk]
        who = f"{row.host} pid {row.pid} {row.label}".strip()
        if outcome is Outcome.WRITTEN:
            back.append(column.pk_from(object_pk))
            extra = _fields(resource.name, "claim_returned", row)
            logger.warning("%s was given back: its worker (%s) is gone.", row, who, extra=extra)
        elif outcome is Outcome.CHANGED:
            message = "%s was left alone: its worker (%s) is gone, but its status was changed since."
            logger.warning(message, row, who, extra=_fields(resource.name, "claim_left", row))
    return back


def _standing(keeper: Keeper, resource: Resource) -> set[tuple[int, int]]:
    """Return which permits of the name still stand, on the keeper's thread, once those of the dead are freed."""
    backend, own = keeper.backend, keeper.own
    if backend.process_local:
        return backend.standing(own, resource)

    def look() -> set[tuple[int, int]]:
        if not backend.released_on_disconnect:
            own.run(lambda cursor: None)  # with the connection, the beacon is lit
        backend.free_dead(own, resource, witness=keeper.reach.presence.beacon)
        return backend.standing(own, resource)

    try:
        return keeper.submit(look).result(_PATIENCE)
    except TimeoutError as error:
        raise BackendError(f"The database {keeper.alias!r} did not answer within {_PATIENCE:g} s.") from error


def _is_readable(column: StatusColumn, row: ClaimRow) -> bool:
    try:
        column.pk_from(row.object_pk), column.value_from(row.from_status), column.value_from(row.status)
    except (ValidationError, ValueError) as error:
        extra = _fields(column.resource.name, "claim_left", row)
        logger.error("%s can't be given back, as its model has changed: %s", row, error, extra=extra)
        return False
    return True


def _fields(name: str, what: str, row: ClaimRow) -> dict[str, Any]:
    return {"semaphore": name, "what": what, "object": row.object_pk, "holder_host": row.host, "holder_pid": row.pid}
