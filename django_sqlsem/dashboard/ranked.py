"""A long list of which a few rows stand first, told by their keys: nothing is counted or sorted for all the others."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.db.models import QuerySet

    from django_sqlsem.models import SemaphoreRow


class RankedRows:
    """The rows of ``rows``, ordered by name, with those of ``ranks`` before all others: the smallest rank first.

    ``last``: behind all others, the smallest rank last. ``names``: the names of all rows by their keys, if they are
    known. ``most``: so many rows are counted at the most. It is what a paginator needs of a list.
    """

    ordered = True

    def __init__(
        self,
        rows: QuerySet[SemaphoreRow],
        ranks: Mapping[str, Any],
        *,
        last: bool = False,
        names: Mapping[str, str] | None = None,
        most: int | None = None,
    ) -> None:
        self._rows = rows
        self._ranks = ranks
        self._last = last
        self._names = names
        self._most = most

    def count(self) -> int:
        """Return how many rows there are."""
        return self._count

    def __getitem__(self, part: slice) -> list[SemaphoreRow]:
        start, stop = part.start or 0, self._count if part.stop is None else min(part.stop, self._count)
        ranked = self._ranked
        before = 0 if not self._last else self._count - len(ranked)
        # Where the ranked ones lie within this part, and where the others do, each counted from their own first.
        mine = ranked[max(0, start - before) : max(0, stop - before)]
        first, end = max(0, start - len(ranked) + before), max(0, stop - len(ranked) + before)
        if self._last:
            first, end = min(start, before), min(stop, before)
        others = self._others(first, end) if first < end else []
        return others + self._of(mine) if self._last else self._of(mine) + others

    @cached_property
    def _count(self) -> int:
        if self._names is not None:
            return len(self._names)
        return (self._rows if self._most is None else self._rows.order_by()[: self._most]).count()

    @cached_property
    def _ranked(self) -> list[str]:
        """The keys of the ranked rows that are in the list at all, in their order."""
        if not self._ranks:
            return []
        if self._names is not None:
            names = [(name, key) for key, name in self._names.items() if key in self._ranks]
        else:
            names = list(self._rows.filter(pk__in=list(self._ranks)).order_by().values_list("name", "pk"))
        return sorted((key for _name, key in sorted(names)), key=lambda key: self._ranks[key], reverse=self._last)

    def _others(self, first: int, end: int) -> list[SemaphoreRow]:
        if self._names is not None and self._rows.query.order_by == ("name",):
            ranked = set(self._ranked)
            others = sorted((name, key) for key, name in self._names.items() if key not in ranked)
            return self._of([key for _name, key in others[first:end]])
        return list((self._rows.exclude(pk__in=self._ranked) if self._ranked else self._rows)[first:end])

    def _of(self, keys: list[str]) -> list[SemaphoreRow]:
        if not keys:
            return []
        # They are known to be in the list: what it was filtered by need not be looked at again.
        every = self._rows.model._default_manager.using(self._rows.db)
        found = {row.pk: row for row in every.filter(pk__in=keys)}
        return [found[key] for key in keys if key in found]
