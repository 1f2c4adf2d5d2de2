"""Which rights on the lock tables a login needs, and for what: asked of a SQL Server database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from django.core import checks

from django_sqlsem.backends.applock_codes import Meaning, meaning
from django_sqlsem.conf import config
from django_sqlsem.models import (
    ClaimRow,
    EventRow,
    MinuteRow,
    RefreshRow,
    SemaphoreRow,
    SlotRow,
    TransactionLockRow,
    WaiterRow,
    WaitRow,
)

_ALL: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: What every acquire reads and writes, unless nothing is recorded.
ACQUIRES: Final = {
    SemaphoreRow._meta.db_table: ("SELECT", "INSERT", "UPDATE"),
    SlotRow._meta.db_table: ("SELECT", "INSERT", "UPDATE"),
    WaiterRow._meta.db_table: _ALL,
}
#: What goes on beside it: without these rights the locks work, and less is known of them.
HISTORY: Final = {EventRow._meta.db_table: ("SELECT", "INSERT", "DELETE"), MinuteRow._meta.db_table: _ALL}
DEADLOCKS: Final = {WaitRow._meta.db_table: _ALL}
#: What only some kinds of locks use.
KINDS: Final = {
    TransactionLockRow._meta.db_table: ("SELECT",),
    ClaimRow._meta.db_table: ("SELECT", "INSERT", "DELETE"),
    RefreshRow._meta.db_table: ("SELECT", "INSERT", "UPDATE"),
}

#: Runs one query and returns its first row.
Row = Callable[[str], tuple[Any, ...]]


def messages(alias: str, where: str, login: str, row: Row) -> Iterator[checks.CheckMessage]:
    """Yield what the login lacks. Tables that are not there count as granted."""
    settings = config(alias)
    if missing := _missing(row, ACQUIRES if settings.record else {}):
        yield checks.Error(
            f"{where} does not let the login {login!r} record who holds what: {missing}.",
            hint="Grant these rights. See docs/checks.md#sqlseme006.",
            id="sqlsem.E006",
        )
    beside = (HISTORY if settings.history else {}) | (DEADLOCKS if settings.deadlocks != "ignore" else {})
    if missing := _missing(row, beside):
        yield checks.Warning(
            f"{where} does not let the login {login!r} record what happens, or who waits for whom: {missing}.",
            hint='Grant these rights, or turn it off: SQLSEM["HISTORY"], SQLSEM["DEADLOCKS"]. '
            "See docs/checks.md#sqlsemw013.",
            id="sqlsem.W013",
        )
    if missing := _missing(row, KINDS):
        yield checks.Info(
            f"{where} does not let the login {login!r} use all kinds of locks: {missing}.",
            hint="Grant these rights if you use claims, refresh_every() or transaction_lock(). "
            "See docs/checks.md#sqlsemi002.",
            id="sqlsem.I002",
        )


def _missing(row: Row, wanted: Mapping[str, tuple[str, ...]]) -> str:
    asked = {
        f"{right} on {table}": f"HAS_PERMS_BY_NAME(N'{table}', N'OBJECT', N'{right}')"
        for table, rights in wanted.items()
        for right in rights
    }
    if not asked:
        return ""
    granted = dict(zip(asked, row(f"SELECT {', '.join(asked.values())};\n"), strict=True))
    # Of a table on which a login has no right at all it is not even told that there is one.
    hidden = {table for table in wanted if granted[f"SELECT on {table}"] is None and _is_refused(row, table)}
    return ", ".join(
        right for right, answer in granted.items() if answer == 0 or (answer is None and right.split()[-1] in hidden)
    )


def _is_refused(row: Row, table: str) -> bool:
    try:
        row(f"SELECT TOP (0) 1 FROM {table};\n")  # noqa: S608
    except Exception as error:  # noqa: BLE001 - of the driver, whatever it is
        return meaning(error) is Meaning.FORBIDDEN or "permission" in str(error).lower()
    return False
