"""Statements on connections that are not ours: the caller's own, and an operator's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from django.db import Error as DjangoDatabaseError
from django.db import transaction

from django_sqlsem.sessions import backend_error

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.cursors import AnyCursor

T = TypeVar("T")


class CallerSession:
    """The caller's own connection inside its ``atomic()``: on SQLite there is only one writer."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.attempts = 0

    def run(self, work: Callable[[AnyCursor], T], *, again: bool = True) -> T:
        """Call ``work`` with a cursor of the caller's transaction. Raises ``BackendError``."""
        self.attempts += 1
        try:
            with self.connection.cursor() as cursor:
                return work(cursor)
        except DjangoDatabaseError as error:
            raise backend_error(self.connection.alias, error) from error

    def transaction(self, work: Callable[[AnyCursor], T | None], *, again: bool = True) -> T | None:
        """Call ``work`` inside a savepoint; undo it if it returns ``None``. Raises ``BackendError``."""
        savepoint = self.connection.savepoint()
        try:
            result = self.run(work)
        except BaseException:
            if savepoint is not None:
                with contextlib.suppress(DjangoDatabaseError):  # a deadlock has ended the transaction, and it with that
                    self.connection.savepoint_rollback(savepoint)
            raise
        if savepoint is None:
            pass  # the caller's atomic() was told to use none
        elif result is None:
            self.connection.savepoint_rollback(savepoint)
        else:
            self.connection.savepoint_commit(savepoint)
        return result


class OrdinarySession(CallerSession):
    """The ordinary connection of an alias, for what follows an operator's act."""

    def transaction(self, work: Callable[[AnyCursor], T | None], *, again: bool = True) -> T | None:
        """Call ``work`` in a transaction, or a savepoint of the one that is open. Raises ``BackendError``."""
        with transaction.atomic(using=self.connection.alias):
            return super().transaction(work)
