"""The list of all locks, those in trouble first, at a cost that does not grow with their number.

All names that one template has made are one row of it, which opens to a list of them. Who searches, or asks for a
state, gets names.

A few names, known by their keys, stand first in a long list: the database counts and sorts nothing for all the others.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR, ChangeList
from django.db.models import Value
from django.db.models.functions import Upper
from django.db.models.lookups import Contains
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.text import smart_split, unescape_string_literal
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem import queries
from django_sqlsem.admin import live
from django_sqlsem.admin.display import KIND_WORDS, visible
from django_sqlsem.admin.lists import StateFilter
from django_sqlsem.core.names import key_of
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.serialize import Lately
from django_sqlsem.snapshots import MOST_NAMES, SURVEY_STATES, TemplateSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from django.db.models import QuerySet
    from django.http import HttpRequest, HttpResponse

    from django_sqlsem.queries import Reading


#: A search that finds no more than this is known by its names from then on.
FEW_NAMES: Final = 1000
#: A search lists no more than this: to count all of a hundred thousand names takes longer than the page.
SEARCHED: Final = 10_000
#: The columns that rank a few names before all others, which have none.
RANKED: Final = ("held", "stale", "waiting")


class Joined:
    """Several sequences as one: of each, with its length, only what a page shows is read.

    It is what Django's list and its paginator need of a queryset.
    """

    ordered = True

    def __init__(self, *parts: tuple[Any, int]) -> None:
        self._parts = parts

    def count(self) -> int:
        """Return how many there are."""
        return sum(count for _rows, count in self._parts)

    def _clone(self) -> Joined:
        return self

    def __getitem__(self, part: slice) -> list[Any]:
        start, stop = part.start or 0, self.count() if part.stop is None else part.stop
        found: list[Any] = []
        for rows, count in self._parts:
            if start < count and stop > 0:
                found += rows[max(0, start) : min(count, stop)]
            start, stop = start - count, stop - count
        return found


def ranked(
    rows: QuerySet[SemaphoreRow],
    ranks: Mapping[str, Any],
    *,
    groups: Mapping[str, TemplateSnapshot] | None = None,
    last: bool = False,
    names: Mapping[str, str] | None = None,
    most: int | None = None,
    count: int | None = None,
) -> Joined:
    """Return the names of ``rows`` in their order, with those of ``ranks`` before all others: the smallest rank first.

    ``ranks``: by the keys of names, and of ``groups``, which stand before all other names. ``last``: behind all
    others, the smallest rank last. ``names``: the names of all rows by their keys, if they are known. ``most``: so many
    rows are counted at the most. ``count``: how many rows there are, if that is known.
    """
    groups = groups or {}
    if names is not None:
        count, known = len(names), {key: name for key, name in names.items() if key in ranks}
    else:
        count = (rows if most is None else rows.order_by()[:most]).count() if count is None else count
        known = dict(rows.filter(pk__in=list(ranks)).order_by().values_list("pk", "name")) if ranks else {}
    labels = known | {key: group.template for key, group in groups.items() if key in ranks}
    by_label = sorted(labels, key=lambda key: labels[key])
    first = [groups.get(key) or known[key] for key in sorted(by_label, key=lambda key: ranks[key], reverse=last)]
    calm = sorted((group for key, group in groups.items() if key not in ranks), key=lambda group: group.template)
    if rows.query.order_by[:1] == ("-name",):
        calm.reverse()
    others: Any = (rows.exclude(pk__in=list(known)) if known else rows).values_list("name", flat=True)
    if names is not None and rows.query.order_by == ("name",):
        others = sorted(name for key, name in names.items() if key not in known)
    parts = [(first, len(first)), (calm, len(calm)), (others, max(0, count - len(known)))]
    return Joined(*(reversed(parts) if last else parts))


def searched(names: QuerySet[SemaphoreRow], words: str) -> QuerySet[SemaphoreRow]:
    """Keep the names that have all these words somewhere, whatever the case of letters; a quoted phrase is one word."""
    for word in smart_split(words):
        part = unescape_string_literal(word) if word[0] in "'\"" and word[0] == word[-1] else word
        if part.lower() == part.upper():  # the comparison of names as they are is much quicker
            names = names.filter(name__contains=part)
        else:  # what ignores case by itself does not where columns compare by code points
            names = names.filter(Contains(Upper("name"), Upper(Value(part))))
    return names


def deadlocked(reading: Reading) -> list[str]:
    """Return the keys of the names in a deadlock."""
    return [key_of(name) for deadlock in reading.deadlocks for name in deadlock.names]


def trouble(reading: Reading) -> dict[str, int]:
    """Return the ranks of the names in trouble, as of templates: they stay the same while others come and go."""
    listed = reading.survey.listed
    groups = (listed("stale").counts, deadlocked(reading), listed("waiting").counts, listed("paused").counts)
    ranks: dict[str, int] = {}
    for rank, keys in enumerate(groups):
        for key in keys:
            ranks.setdefault(key, rank)
    return ranks


class OverviewStateFilter(StateFilter):
    """Keeps the names of a state. The survey that the page needs anyway has most of them."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        reading = live.reading_of(request)
        survey = self.survey = reading.survey
        template = request.GET.get("template")
        groups = reading.templates if template else []
        #: Whose counts are told: those of all names, or of the template that is open.
        self.told = next((each for each in groups if each.template == template), survey)
        return [
            ("held", ngettext("slot held", "slots held", survey.held)),
            ("stale", _("stale")),
            ("waiting", _("waiting")),
            ("paused", ngettext("name paused", "names paused", survey.paused)),
            ("draining", _("draining")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Go by the survey if it lists them all."""
        state = cast("Any", self.value())
        if state not in SURVEY_STATES:
            return queryset
        listed = self.survey.listed(state)
        if listed.complete:
            return queryset.filter(pk__in=list(listed.counts))
        return queryset.filter(live.reading_of(request).in_state(state))

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Add how many there are."""
        for choice, state in zip(super().choices(changelist), ("", *SURVEY_STATES), strict=True):
            yield {**choice, "state": state, "count": getattr(self.told, state, "")}


class KindFilter(admin.SimpleListFilter):
    """Keeps one kind of lock."""

    title = gettext_lazy("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(kind, str(word)) for kind, word in KIND_WORDS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        kind = self.value()
        if kind is None:
            return queryset
        return queryset.filter(kind=kind) if kind in KIND_WORDS else queryset.none()


class TemplateFilter(admin.SimpleListFilter):
    """Keeps the names that one template has made."""

    title = gettext_lazy("template")
    parameter_name = "template"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        template = self.value()
        return [(template, visible(template))] if template else []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        template = self.value() or ""
        return queryset.none() if "\0" in template else queryset.filter(template=template)


class OverviewChangeList(ChangeList):
    """Locks, those in trouble first unless a column says otherwise. Its rows are made of snapshots."""

    #: What stands for the names of a template, by a key that no name has.
    groups: Mapping[str, TemplateSnapshot] = MappingProxyType({})
    #: Whether there may be more than are listed.
    cut_off = False
    #: A column of ``RANKED`` by which the list is ordered, with a minus for the largest first.
    ranking: str | None = None

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        self.reading = live.reading_of(request)
        self._names: dict[str, str] | None = None
        super().__init__(request, *args, **kwargs)

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Keep what the database need not sort by for itself; no two rows have one name."""
        # Django 6.1 looks the names up, and those of ``RANKED`` are no fields.
        known = queryset.annotate(**{name: Value(0) for name in RANKED})
        ordering = [part for part in super().get_ordering(request, known) if part not in ("pk", "-pk")]
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
        if not (self.query or self.params.get("state") or self.params.get("template")):
            kind = self.params.get("kind")
            found = found.filter(template="")
            self.groups = {f"{{{each.template}": each for each in self.reading.templates if kind in (None, each.kind)}
        if self.query or self.has_active_filters:
            few = MOST_NAMES if self.params.get("state") else FEW_NAMES
            names = dict(found.order_by().values_list("pk", "name")[: few + 1])
            if len(names) <= few:
                self._names = names
                return self.root_queryset.filter(pk__in=list(names)).order_by(*found.query.order_by)
        return found

    def get_results(self, request: HttpRequest) -> None:
        """Read the names of one page, and then their snapshots and what they were like in the last hour."""
        queryset, most = self.queryset, SEARCHED if self.query else None
        last = self.ranking in RANKED
        count = None if self.query or self.has_active_filters else self.reading.without_template
        names: Any = ranked(
            queryset, self._ranks(), groups=self.groups, last=last, names=self._names, most=most, count=count
        )
        self.queryset = names
        super().get_results(request)
        self.queryset, self.result_list = queryset, self._rows(self.result_list[:])
        self.show_admin_actions = bool(self.result_count)
        self.cut_off = self.result_count == most

    def _ranks(self) -> dict[str, Any]:
        if self.ranking:
            state = self.ranking.lstrip("-")
            counts = {key: getattr(group, state) for key, group in self.groups.items()}
            counts |= self.reading.survey.listed(state).counts
            # With the others before them, the smallest rank comes last; the order of names is that of a page.
            return {key: -count for key, count in counts.items() if count}
        if self.params.get(ORDER_VAR):
            return {}
        ranks = {key: group.rank for key, group in self.groups.items() if group.rank is not None}
        return ranks | trouble(self.reading)

    def url_for_result(self, result: Any) -> str:
        """Return where a row leads: to the page of a lock, or to the names of a template."""
        if not isinstance(result.known, TemplateSnapshot):
            return super().url_for_result(result)
        # Django adds the filters and the order of this page, and its number.
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
        query = urlencode({"template": result.known.template, PAGE_VAR: 1})
        return f"{reverse(name, current_app=self.model_admin.admin_site.name)}?{query}"

    def _rows(self, entries: list[Any]) -> list[Any]:
        """Return the rows of names and templates."""
        found = self.reading.by_name(each for each in entries if isinstance(each, str))
        lately, bad = queries.lately(found.values()), set(deadlocked(self.reading))
        rows = []
        for each in entries:
            if isinstance(each, TemplateSnapshot):
                rows.append(_row_of_template(each))
            elif each in found:  # else it was purged just now
                row: Any = SemaphoreRow(key=key_of(each), name=each, kind=found[each].kind)
                row.known, row.lately, row.deadlocked = found[each], lately[each], row.key in bad
                rows.append(row)
        return rows


def _row_of_template(group: TemplateSnapshot) -> Any:
    row: Any = SemaphoreRow(name=group.template, kind=group.kind)
    row.known, row.deadlocked = group, bool(group.deadlocked)
    row.lately = Lately(turned_away=group.turned_away, longest_hold=group.longest_hold, longest_wait=group.longest_wait)
    return row


def overview_answer(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Add to Django's list what stands above it, and send only the changing part to the script that asks for that."""
    if live.is_fragment(request) and response.status_code == 302:
        # Pages became fewer meanwhile. The script would take a redirect for the end of the session.
        return live.plain(_("There is no such page any more."), 404)
    if not isinstance(response, TemplateResponse) or "cl" not in (context := cast("Any", response.context_data)):
        return response
    changelist = context["cl"]
    filters = {spec.parameter_name: spec.choices(changelist) for spec in changelist.filter_specs}
    context |= {
        "refresh_seconds": live.REFRESH_SECONDS,
        "sqlsem_deadlocks": [visible(str(each)) for each in changelist.reading.deadlocks],
        "sqlsem_states": filters["state"],
        "sqlsem_kinds": filters["kind"],
        "sqlsem_template": visible(request.GET.get("template", "")),
    }
    if not live.is_fragment(request):
        return response
    return live.fragment(request, "admin/sqlsem/semaphorerow/_overview.html", context)
