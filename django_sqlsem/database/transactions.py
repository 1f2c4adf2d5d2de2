"""The end of the caller's transaction, committed or rolled back."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any, Final

from django.db import connections

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper


logger = logging.getLogger("django_sqlsem")

_ENDS: Final = ("commit", "rollback", "close", "set_autocommit")


def at_transaction_end(using: str | None, callback: Callable[[], object]) -> None:
    """Run ``callback`` once, when the outermost transaction on this thread's connection has ended.

    ``using`` is a database alias; ``None`` means every alias with an open transaction, and the last of them to end
    counts. Without a transaction the callback runs at once. Afterwards an ``Exception`` of the callback is logged,
    because raising it there would make a transaction that was committed look as if it had failed; after a
    ``KeyboardInterrupt`` or its like the callback runs once more.
    """
    aliases = open_transactions() if using is None else [using] * in_transaction(connections[using])
    if not aliases:
        callback()
        return
    remaining = set(aliases)

    def ended(alias: str) -> None:
        remaining.discard(alias)
        if not remaining:
            callback()

    for alias in aliases:
        _watch(connections[alias]).callbacks.append(functools.partial(ended, alias))


def before_transaction_ends(using: str, callback: Callable[[bool], object]) -> None:
    """Run ``callback(committing)`` just before the outermost transaction of an alias on this thread ends.

    It may still use the connection. After a commit that fails it is run again, before the rollback. An ``Exception``
    of the callback is logged. The transaction must be open.
    """
    _watch(connections[using]).before.append(callback)


def after_savepoint_rollback(using: str, callback: Callable[[int], object]) -> None:
    """Run ``callback(number)`` after each rollback to a savepoint of the open transaction, which is still open then.

    Savepoints are numbered in the order in which they were made; see ``savepoints_so_far``.
    """
    _watch(connections[using]).undone.append(callback)


def must_fail(using: str) -> None:
    """Have the open ``atomic()`` blocks of an alias fail, all of them: Django rolls back no more than the innermost.

    Those around a ``TestCase``'s test go on. Without ``atomic()`` it is the program that ends its transaction.
    """
    connection = connections[using]

    def mark(_savepoint: int = 0) -> None:
        connection.needs_rollback = connection.in_atomic_block

    mark()
    after_savepoint_rollback(using, mark)  # there Django forgets the mark


def savepoints_so_far(connection: BaseDatabaseWrapper) -> int:
    """Return the number of the last savepoint that was made."""
    return int(connection.savepoint_state)


def open_transactions() -> list[str]:
    """Return the aliases on which the calling thread is inside a transaction."""
    return [connection.alias for connection in connections.all(initialized_only=True) if in_transaction(connection)]


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Is a transaction open on the connection, apart from those that a ``TestCase`` wraps around a test?"""
    if connection.closed_in_transaction or connection.connection is None:
        return False
    if connection.in_atomic_block:
        return not all(_from_testcase(block) for block in connection.atomic_blocks)
    return not connection.autocommit


def _from_testcase(block: object) -> bool:
    return bool(getattr(block, "_from_testcase", False))


def _watch(connection: BaseDatabaseWrapper) -> _Watch:
    watch: _Watch | None = connection.__dict__.get("_sqlsem_watch")
    if watch is None:
        watch = connection.__dict__["_sqlsem_watch"] = _Watch(connection)
    return watch


class _Watch:
    """Callbacks that wait for the end of one connection's transaction.

    Django has no hook for a rollback, and drops what ``on_commit()`` was given inside a savepoint that is rolled
    back. Every transaction, whether of ``atomic()`` or not, ends in one of four public methods of the connection, so
    these are wrapped on this instance until the end. The blocks of a ``TestCase`` never end within a test: there the
    outermost block inside them counts, and its leaving ``atomic_blocks`` is the only trace that it always has.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self.callbacks: list[Callable[[], object]] = []
        self.before: list[Callable[[bool], object]] = []
        self.undone: list[Callable[[int], object]] = []
        self.ending = False
        self.wrappers = {name: self._wrap(getattr(connection, name)) for name in _ENDS}
        self.wrappers["savepoint_rollback"] = self._wrap_undo(connection.savepoint_rollback)
        connection.__dict__.update(self.wrappers)
        if any(_from_testcase(block) for block in connection.atomic_blocks):
            connection.atomic_blocks = _Blocks(connection.atomic_blocks, self)

    @property
    def waits(self) -> bool:
        """Whether anything is to be done until the end, or at it."""
        return bool(self.callbacks or self.undone)

    def _wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            succeeded = False
            if self.before and not self.ending:
                self._announce(method.__name__)
            try:
                result = method(*args, **kwargs)
                succeeded = True
                return result
            finally:
                if self.waits and not self.ending and self._has_ended(method.__name__, succeeded):
                    self.end()

        return wrapper

    def _wrap_undo(self, method: Callable[[str], Any]) -> Callable[[str], Any]:
        @functools.wraps(method)
        def wrapper(sid: str) -> Any:
            method(sid)
            for callback in list(self.undone):
                callback(int(sid.rpartition("x")[2]))

        return wrapper

    def _announce(self, method: str) -> None:
        connection = self.connection
        if method != "close" and (connection.in_atomic_block or connection.autocommit):
            return
        for callback in list(self.before):
            try:
                callback(method in ("commit", "set_autocommit"))
            except Exception:
                logger.exception("A callback before the end of a transaction failed.")

    def _has_ended(self, method: str, succeeded: bool) -> bool:
        connection = self.connection
        if connection.closed_in_transaction or connection.connection is None:
            return True
        if connection.in_atomic_block:
            return False
        # A commit that fails leaves the end to the rollback, or to the close, that Django tries next.
        return succeeded if method in ("commit", "rollback") else connection.autocommit

    def end(self) -> None:
        """Run the callbacks, each of them whatever the others do, and unwrap the connection."""
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._unwrap)
                self.ending = True  # a callback may use the connection, and must not end up here again
                self.before.clear()
                self.undone.clear()
                self.connection.__dict__.pop("_sqlsem_watch", None)  # what it asks for is a matter of the next end
                for callback in reversed(self.callbacks):
                    stack.callback(self._run, callback, last=True)  # again, if the first run is interrupted
                    stack.callback(self._run, callback)
        finally:
            self.ending = False

    def _run(self, callback: Callable[[], object], *, last: bool = False) -> None:
        if callback not in self.callbacks:
            return
        if last:
            self.callbacks.remove(callback)
        try:
            callback()
        except Exception:
            logger.exception("A callback at the end of a transaction failed.")
        if not last:
            self.callbacks.remove(callback)

    def _unwrap(self) -> None:
        if self.callbacks:
            return  # it was interrupted: the next of the four methods goes on from here
        connection = self.connection
        for name, wrapper in self.wrappers.items():
            if connection.__dict__.get(name) is wrapper:  # else someone has wrapped ours: it only passes on by now
                del connection.__dict__[name]
        if isinstance(connection.atomic_blocks, _Blocks) and connection.atomic_blocks.watch is self:
            connection.atomic_blocks = list(connection.atomic_blocks)


class _Blocks(list[Any]):
    """The stack of a connection's atomic blocks inside a ``TestCase``."""

    def __init__(self, blocks: list[Any], watch: _Watch) -> None:
        super().__init__(blocks)
        self.watch = watch

    def pop(self, *args: Any) -> Any:
        """Remove a block; if only the blocks of the ``TestCase`` remain, the test's own transaction is over."""
        block = super().pop(*args)
        if self.watch.waits and not self.watch.ending and all(_from_testcase(left) for left in self):
            self.watch.end()
        return block
