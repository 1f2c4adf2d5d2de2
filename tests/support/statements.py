"""A session that keeps what it sends, for tests of what something costs."""

from __future__ import annotations

from typing import Any

from django_sqlsem.database.sessions import OwnSession


class CountedSession(OwnSession):
    """A session of the library's own kind; ``statements`` are those that it has sent, but ``BEGIN`` and ``COMMIT``."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self.statements: list[str] = []
        self._in_transaction = False

    def run(self, work: Any, *, again: bool = True) -> Any:
        return super().run(work if self._in_transaction else self._counted(work), again=again)

    def transaction(self, work: Any, *, again: bool = True) -> Any:
        self._in_transaction = True
        try:
            return super().transaction(self._counted(work), again=again)
        finally:
            self._in_transaction = False

    def _counted(self, work: Any) -> Any:
        return lambda cursor: work(_Cursor(cursor, self.statements))

    def sent(self) -> int:
        """Return how many it has sent since the last call."""
        count = len(self.statements)
        self.statements.clear()
        return count


class _Cursor:
    def __init__(self, cursor: Any, statements: list[str]) -> None:
        self._cursor = cursor
        self._statements = statements

    def execute(self, sql: str, parameters: Any = None) -> None:
        self._statements.append(sql)
        self._cursor.execute(sql, parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)
