"""The overview: the list of all locks, those in trouble first, at a cost that does not grow with their number.

A few rows, known by their keys, stand first in a long list: the database counts and sorts nothing for all the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR
from django.core.paginator import InvalidPage
from django.db.models import Value
from django.db.models.functions import Upper
from django.db.models.lookups import Contains
from django.template.response import TemplateResponse
from django.utils.text import smart_split, unescape_string_literal
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem import queries
from django_sqlsem.admin import drawing, live
from django_sqlsem.admin.display import KINDS, SnapshotChangeList, StateFilter, attach, snapshot_of
from django_sqlsem.core.names import key_of
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.snapshots import MOST_NAMES, SURVEY_STATES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

    from django_sqlsem.snapshots import Survey


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


#: A search that finds no more than this is known by its names from then on.
FEW: Final = 1000
#: A search lists no more than this: to count all of a hundred thousand names takes longer than the page.
SEARCHED: Final = 10_000
#: The columns that rank a few names before all others, which have none.
RANKED: Final = ("held", "stale", "waiting")


def searched(names: QuerySet[SemaphoreRow], words: str) -> QuerySet[SemaphoreRow]:
    """Keep the names that have all these words somewhere, whatever the case of letters; a quoted phrase is one word."""
    for word in smart_split(words):
        part = unescape_string_literal(word) if word[0] in "'\"" and word[0] == word[-1] else word
        if part.lower() == part.upper():  # the comparison of names as they are is much quicker
            names = names.filter(name__contains=part)
        else:  # what ignores case by itself does not where columns compare by code points
            names = names.filter(Contains(Upper("name"), Upper(Value(part))))
    return names


@dataclass(frozen=True, slots=True)
class Trouble:
    """How all names stand, and which of them wait for each other; read once per request."""

    survey: Survey
    deadlocks: Collection[Any]
    #: The keys of the names in a deadlock.
    deadlocked: frozenset[str]

    @classmethod
    def of(cls, request: HttpRequest) -> Trouble:
        """Read it, unless this request has."""
        known: Trouble | None = getattr(request, "sqlsem_trouble", None)
        if known is None:
            deadlocks = queries.deadlocks()
            names = {wait.name for deadlock in deadlocks for wait in deadlock.waits}
            known = cls(queries.survey(), deadlocks, frozenset(map(key_of, names)))
            request.sqlsem_trouble = known  # type: ignore[attr-defined]
        return known

    def ranks(self) -> dict[str, int]:
        """Return the ranks of the names in trouble, which stay the same while others come and go."""
        ranks: dict[str, int] = {}
        listed = self.survey.listed
        for rank, keys in enumerate((listed("stale").counts, self.deadlocked, listed("waiting").counts)):
            for key in keys:
                ranks.setdefault(key, rank)
        for key in listed("paused").counts:
            ranks.setdefault(key, len(RANKED))
        return ranks


class OverviewStateFilter(StateFilter):
    """Keeps the names of a state. The survey that the page needs anyway has most of them."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the states."""
        return [*super().lookups(request, model_admin), ("paused", _("paused")), ("draining", _("draining"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Go by the survey if it lists them all."""
        state = cast("Any", self.value())
        if state not in SURVEY_STATES:
            return queryset
        listed = Trouble.of(request).survey.listed(state)
        if listed.complete:
            return queryset.filter(pk__in=list(listed.counts))
        return queryset.filter(queries.in_state(state))


class KindFilter(admin.SimpleListFilter):
    """Keeps one kind of lock."""

    title = gettext_lazy("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the kinds that there are, whether or not anything is of that kind."""
        return [(kind, str(word)) for kind, word in KINDS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Compare the kind."""
        kind = self.value()
        if kind is None:
            return queryset
        return queryset.filter(kind=kind) if kind in KINDS else queryset.none()


class OverviewChangeList(SnapshotChangeList):
    """Locks, those in trouble first unless a column says otherwise."""

    #: Whether there may be more than are listed.
    cut_off = False
    #: A column of ``RANKED`` by which the list is ordered, with a minus for the largest first.
    ranking: str | None = None

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        self.request = request
        self._names: dict[str, str] | None = None
        super().__init__(request, *args, **kwargs)

    @cached_property
    def trouble(self) -> Trouble:
        """How all names stand, for the line above the list."""
        return Trouble.of(self.request)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Keep what the database need not sort by for itself; no two rows have one name."""
        ordering = [part for part in super().get_ordering(request, queryset) if part not in ("pk", "-pk")]
        first = ordering[0] if ordering and isinstance(ordering[0], str) else ""
        self.ranking = first if first.lstrip("-") in RANKED else None
        kept = [part for part in ordering if not isinstance(part, str) or part.lstrip("-") not in RANKED]
        return kept if "name" in kept or "-name" in kept else [*kept, "name"]

    def get_ordering_field_columns(self) -> dict[int, Any]:
        """No column is the one that the list is ordered by unless one was chosen."""
        return super().get_ordering_field_columns() if ORDER_VAR in self.params else {}

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Search and filter once: what finds few names is known by these from then on."""
        found = super().get_queryset(request, exclude_parameters)
        if self.query or self.has_active_filters:
            few = MOST_NAMES if self.params.get("state") else FEW
            names = dict(found.order_by().values_list("pk", "name")[: few + 1])
            if len(names) <= few:
                self._names = names
                return self.root_queryset.filter(pk__in=list(names)).order_by(*found.query.order_by)
        return found

    def get_results(self, request: HttpRequest) -> None:
        """Read one page, and then the snapshots of its names and what they were like in the last hour."""
        most = SEARCHED if self.query else None
        rows = RankedRows(self.queryset, self._ranks(), last=self.ranking in RANKED, names=self._names, most=most)
        paginator = self.model_admin.get_paginator(request, cast("Any", rows), self.list_per_page)
        self.result_count = paginator.count
        self.show_full_result_count = False
        self.show_admin_actions = bool(self.result_count)
        self.full_result_count = None
        self.can_show_all = self.result_count <= self.list_max_show_all
        self.multi_page = self.result_count > self.list_per_page
        self.paginator = paginator
        self.cut_off = self.result_count == most
        if (self.show_all and self.can_show_all) or not self.multi_page:
            self.result_list = rows[0 : self.result_count]
        else:
            try:
                self.result_list = paginator.page(self.page_num).object_list
            except InvalidPage:
                raise IncorrectLookupParameters from None
        self._attach(self.result_list)

    def _ranks(self) -> dict[str, Any]:
        if self.ranking:
            counts = self.trouble.survey.listed(self.ranking.lstrip("-")).counts
            # With the others before them, the smallest rank comes last; the order of names is that of a page.
            return {key: -count for key, count in counts.items()}
        return {} if self.params.get(ORDER_VAR) else self.trouble.ranks()

    def _attach(self, rows: list[SemaphoreRow]) -> None:
        attach(rows)
        found = {row.name: snapshot for row in rows if (snapshot := snapshot_of(row)) is not None}
        lately = queries.lately(found.values())
        for row in cast("Any", rows):
            row.sqlsem_lately = lately.get(row.name)
            row.sqlsem_deadlocked = row.pk in self.trouble.deadlocked


def overview_answer(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Add to Django's list what stands above it, and send only the changing part to the script that asks for that."""
    if live.is_fragment(request) and response.status_code == 302:
        # Pages became fewer meanwhile. The script would take a redirect for the end of the session.
        return live.plain(_("There is no such page any more."), 404)
    if not isinstance(response, TemplateResponse) or "cl" not in (context := cast("Any", response.context_data)):
        return response
    changelist = context["cl"]
    survey = changelist.trouble.survey
    chosen = changelist.params.get("state")
    context["refresh_seconds"] = live.REFRESH_SECONDS
    context["sqlsem_deadlocks"] = [drawing.visible(str(each)) for each in changelist.trouble.deadlocks]
    context["sqlsem_states"] = [
        {
            "state": state,
            "count": getattr(survey, state, ""),
            "word": word,
            "chosen": chosen == (state or None),
            "url": changelist.get_query_string({"state": state or None}, [PAGE_VAR]),
        }
        for state, word in (
            ("", _("All")),
            ("held", ngettext("slot held", "slots held", survey.held)),
            ("stale", _("stale")),
            ("waiting", _("waiting")),
            ("paused", ngettext("name paused", "names paused", survey.paused)),
            ("draining", _("draining")),
        )
    ]
    kinds = (spec for spec in changelist.filter_specs if isinstance(spec, KindFilter))
    context["sqlsem_kinds"] = [choice for spec in kinds for choice in spec.choices(changelist)]
    if not live.is_fragment(request):
        return response
    return live.fragment(request, "admin/sqlsem/semaphorerow/_overview.html", context)
