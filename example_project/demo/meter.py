"""A counter of the demo's own. It knows nothing of the library: each line is one UPDATE, committed at once."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from asgiref.sync import sync_to_async
from django.db import connection
from django.db.models import F

from example_project.demo.models import Meter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

# `peak` comes first: MySQL assigns from left to right, and would otherwise add one twice.
_ENTER = (
    "UPDATE demo_meter SET peak = CASE WHEN inside + 1 > peak THEN inside + 1 ELSE peak END, inside = inside + 1"
    " WHERE id = 1"
)
_LEAVE = "UPDATE demo_meter SET inside = inside - 1 WHERE id = 1"


def _execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


@contextmanager
def counted() -> Iterator[None]:
    """Count the caller as in while the block runs."""
    _execute(_ENTER)
    try:
        yield
    finally:
        _execute(_LEAVE)


@asynccontextmanager
async def acounted() -> AsyncIterator[None]:
    """Count the async caller as in while the block runs."""
    entering = asyncio.ensure_future(sync_to_async(_execute)(_ENTER))
    try:
        await asyncio.shield(entering)
        yield
    finally:
        await entering  # a request cancelled at this very moment is counted out only after it was counted in
        await sync_to_async(_execute)(_LEAVE)


def count(column: str) -> None:
    """Add one to ``finished``, ``retried``, ``failed`` or ``lost``."""
    Meter.objects.filter(pk=1).update(**{column: F(column) + 1})


def read() -> Meter:
    """Return the figures as they are now."""
    return Meter.objects.filter(pk=1).first() or Meter()


def reset() -> None:
    """Start again from zero."""
    Meter.objects.update_or_create(
        pk=1, defaults={field.attname: 0 for field in Meter._meta.concrete_fields if not field.primary_key}
    )
