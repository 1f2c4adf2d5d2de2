"""How operators' acts on rows deal with what the database raises."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from django.db import connections
from django.db.utils import Error

from django_sqlsem.database.limits import is_transient
from django_sqlsem.database.sessions import LOCKED_PATIENCE
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator


Parameters = ParamSpec("Parameters")
T = TypeVar("T")


@contextlib.contextmanager
def database_errors(alias: str) -> Iterator[None]:
    """Turn whatever the database raises into ``BackendError``, with the driver's error as its cause."""
    try:
        yield
    except Error as error:
        raise BackendError(f"The database {alias!r} failed: {error}") from error


def repeated(act: Callable[Parameters, T]) -> Callable[Parameters, T]:
    """Do an act on an alias, its first argument, again if it lost a deadlock or found SQLite locked."""

    @functools.wraps(act)
    def again(*args: Parameters.args, **kwargs: Parameters.kwargs) -> T:
        give_up = time.monotonic() + LOCKED_PATIENCE
        while True:
            try:
                return act(*args, **kwargs)
            except BackendError as error:
                alias = str(args[0])
                passes = isinstance(error.__cause__, Error) and is_transient(error.__cause__)
                # Inside a transaction of the caller's, that is over.
                if not passes or connections[alias].in_atomic_block or time.monotonic() > give_up:
                    raise
            time.sleep(random.uniform(0.001, 0.02))  # noqa: S311 - no two in step

    return again
