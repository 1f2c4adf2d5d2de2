"""Fences: a transaction, or a statement, of the caller's own that takes effect only while a permit is live."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any, Protocol

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, Expression
from django.db.models.sql.compiler import SQLCompiler
from django.db.transaction import TransactionManagementError

from django_sqlsem.backends.base import Acquired
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.text import shown
from django_sqlsem.core.threads import runs
from django_sqlsem.database import transactions
from django_sqlsem.database.server import leads_to_locks
from django_sqlsem.exceptions import BackendError, PermitLostError
from django_sqlsem.runtime.acquisition import Acquisition, State
from django_sqlsem.snapshots import Loss


class _Holder(Protocol):
    """What is asked of a permit, which imports this module."""

    _acquisition: Acquisition

    @property
    def name(self) -> str: ...
    @property
    def lost(self) -> Loss | None: ...
    @property
    def released(self) -> bool: ...
    def check(self) -> None: ...
    def _close(self) -> None: ...


class Fence:
    """One transaction that is fenced with a permit."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.thread = threading.current_thread()
        #: Whether the transaction keeps all other writers out, the permit's renewals too.
        self.exclusive = False
        self.over = False
        #: Whether the database keeps others out by now, and the number of the last savepoint before that.
        self.locked = False
        self.savepoint = 0
        #: The boot clock when the permit was renewed inside the transaction.
        self.renewed_at: float | None = None

    @property
    def stands(self) -> bool:
        """Whether the transaction may be open: it ends with its thread at the latest."""
        return not self.over and runs(self.thread)


def fence(permit: _Holder, using: str | None) -> None:
    """Fence the calling thread's transaction: see ``Permit.fence``."""
    acquisition = permit._acquisition
    connection = _connection(acquisition, using)
    if not transactions.in_transaction(connection):
        raise _no_transaction(connection, permit)
    try:
        permit.check()
        new, found = _begin(permit, connection)
        live = False
        try:
            live = acquisition.keeper.backend.fence(connection, acquisition.keeper.session_here(), acquisition.acquired)
        finally:
            if live:
                _watch_savepoints(permit, found)
            elif new:
                _end(permit, found)
        if not live:
            raise _loss_error(permit)
    except PermitLostError:  # the transaction is rolled back, also if the caller goes on
        transactions.must_fail(connection.alias)
        raise


def fenced(permit: _Holder) -> _Fenced:
    """Return a condition for ``filter()`` that is true only while the database says that ``permit`` is live.

    ``queryset.filter(fenced(permit)).update(...)`` checks and writes in one statement, and changes nothing otherwise.
    The queryset must be of the database that keeps the locks: else ``ValueError`` when it is run. Raises ``TypeError``
    for anything but a permit.
    """
    if not hasattr(permit, "_acquisition"):
        raise TypeError(f"fenced() takes a permit, not {shown(permit)}.")
    return _Fenced(permit)


class _Fenced(Expression):
    """The condition of ``fenced``, in the SQL of the database that it is run on."""

    conditional = True

    def __init__(self, permit: _Holder) -> None:
        super().__init__(output_field=BooleanField())
        self.permit = permit

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        """Return the condition as of now: false for a permit that is known to be lost or was given back."""
        permit, acquisition = self.permit, self.permit._acquisition
        _refuse_elsewhere(connection, acquisition)
        sql, parameters = "1 = 0", list[Any]()
        if permit.lost is None and not permit.released:
            sql, parameters = acquisition.keeper.backend.fenced_sql(connection, acquisition.acquired)
            if transactions.in_transaction(connection):
                _begin(permit, connection)  # what the statement locks is not given back before its transaction ends
        if not connection.ops.conditional_expression_supported_in_where_clause(self):  # then it is compared with 1
            sql = f"CASE WHEN {sql} THEN 1 ELSE 0 END"
        return sql, tuple(parameters)

    def __repr__(self) -> str:
        return f"fenced({self.permit!r})"


def _connection(acquisition: Acquisition, using: str | None) -> BaseDatabaseWrapper:
    if using is None:
        return connections[acquisition.keeper.alias]
    if using not in connections.settings:
        aliases = ", ".join(sorted(connections.settings))
        raise ValueError(f"using is {shown(using)}, which is not in DATABASES: {aliases}.")
    _refuse_elsewhere(connections[using], acquisition)
    return connections[using]


def _refuse_elsewhere(connection: BaseDatabaseWrapper, acquisition: Acquisition) -> None:
    home = acquisition.keeper.alias
    if connection.alias == home:
        return
    backend = acquisition.keeper.backend
    ask = not backend.process_local and backend.supports_renewal
    rows = acquisition.grant.row_ids if acquisition.grant is not None else ()
    if not leads_to_locks(connection.alias, home, acquisition.keeper.work, acquisition.permit_id, rows, ask=ask):
        raise ValueError(
            f"The locks are on {home!r}, another database than {connection.alias!r}, whose transactions cannot be"
            " fenced with them: compare permit.token there, or keep the locks in that database."
        )


def _no_transaction(connection: BaseDatabaseWrapper, permit: _Holder) -> TransactionManagementError:
    message = f"The permit of {permit.name!r} can only fence a transaction on {connection.alias!r}, and none is open"
    elsewhere = [alias for alias in transactions.open_transactions() if alias != connection.alias]
    if elsewhere:
        message += f" in this thread (only on {', '.join(map(repr, elsewhere))})"
    return TransactionManagementError(
        f"{message}: call fence() inside transaction.atomic(), in asynchronous code in the synchronous function that"
        " opens the transaction."
    )


def _begin(permit: _Holder, connection: BaseDatabaseWrapper) -> tuple[bool, Fence]:
    """Note that the transaction is fenced, which puts the permit's release off. Return whether this is new, and it."""
    acquisition = permit._acquisition
    for known in acquisition.fences:
        if isinstance(known, Fence) and known.stands and known.connection is connection:
            return False, known
    found = Fence(connection)
    acquisition.fences = (*acquisition.fences, found)
    transactions.before_transaction_ends(
        connection.alias, partial(_before_end, acquisition, found, acquisition.acquired)
    )
    transactions.at_transaction_end(connection.alias, partial(_end, permit, found))
    return True, found


def _watch_savepoints(permit: _Holder, found: Fence) -> None:
    """Note what the fence does to the permit, and see that it outlives savepoints: row locks go with them."""
    connection = found.connection
    found.exclusive = permit._acquisition.keeper.backend.keeps_renewals_out(connection)
    if not found.locked:
        found.locked = True
        found.savepoint = transactions.savepoints_so_far(connection)
        transactions.after_savepoint_rollback(connection.alias, partial(_fence_again, permit, found))


def _fence_again(permit: _Holder, found: Fence, savepoint: int) -> None:
    """A rollback to a savepoint before the fence has taken it away: set it up again, or have the transaction fail."""
    acquisition, connection = permit._acquisition, found.connection
    if found.over or savepoint > found.savepoint:
        return
    live = False
    with contextlib.suppress(BackendError):
        live = acquisition.keeper.backend.fence(connection, acquisition.keeper.session_here(), acquisition.acquired)
    found.savepoint = transactions.savepoints_so_far(connection)
    if not live:
        transactions.must_fail(connection.alias)
        if not connection.in_atomic_block:
            raise _loss_error(permit)


def _before_end(acquisition: Acquisition, found: Fence, held: Acquired, committing: bool) -> None:
    """Renew a lease that ran out in an exclusive transaction, just before its end: until then no other can take it."""
    if not found.exclusive:
        return
    found.renewed_at, now = None, boot_now()
    if not committing:
        found.exclusive = False  # from here on its deadline counts again
    elif acquisition.loss is None and acquisition.keeper.backend.extend(found.connection, held):
        found.renewed_at = now


def _end(permit: _Holder, found: Fence) -> None:
    acquisition = permit._acquisition
    if found.renewed_at is not None:
        acquisition.renewed(found.renewed_at)
    if found.exclusive:
        acquisition.keeper.renew_now(acquisition)
    found.over = True
    acquisition.fences = tuple(each for each in acquisition.fences if each.stands)
    if acquisition.state is State.PUT_OFF and not acquisition.fenced:
        permit._close()


def _loss_error(permit: _Holder) -> PermitLostError:
    acquisition = permit._acquisition
    with contextlib.suppress(BackendError):
        loss = acquisition.keeper.backend.fate(acquisition.keeper.session_here(), acquisition.acquired)
        if loss is not None:
            acquisition.lose(loss)
    loss = acquisition.current_loss()
    why = str(loss) if loss is not None else "its lease has run out by the database's clock"
    return PermitLostError(f"The permit of {permit.name!r} was lost: {why}.", loss=loss)
