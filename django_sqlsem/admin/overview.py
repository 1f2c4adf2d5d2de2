"""The list of all locks, those in trouble first, at a cost that does not grow with their number.

What is wrong now stands above it, in sentences. All names that one template has made are one row of the list, which
opens to a list of them. Who searches, or asks for a state, gets names.

A few names, known by their keys, stand first in a long list: the database counts and sorts nothing for all the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.templatetags.admin_list import result_headers
from django.contrib.admin.utils import lookup_field
from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR, ChangeList
from django.db.models import QuerySet, Value
from django.db.models.functions import Upper
from django.db.models.lookups import Contains
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import smart_split, unescape_string_literal
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_sqlsem.admin import drawing, live
from django_sqlsem.admin.display import (
    EMPTY,
    KIND_WORDS,
    NONE,
    instant,
    lasting,
    length,
    named,
    program_of,
    users,
    visible,
)
from django_sqlsem.admin.drawing import Range
from django_sqlsem.admin.lists import StateFilter, count_all
from django_sqlsem.core.names import key_of
from django_sqlsem.history.events import Totals, Trend
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.queries import Reading
from django_sqlsem.snapshots import (
    MOST_NAMES,
    SURVEY_STATES,
    HolderSnapshot,
    SemaphoreSnapshot,
    SlotState,
    TemplateSnapshot,
)

#: A search that finds no more than this is known by its names from then on.
FEW_NAMES: Final = 1000
#: A search lists no more than this: to count all of a hundred thousand names takes longer than the page.
SEARCHED: Final = 10_000
#: The columns that rank a few names before all others, which have none.
RANKED: Final = ("held", "waiting")


class Joined:
    """Several sequences as one: of each, with its length, only what a page shows is read.

    It is what Django's list and its paginator need of a queryset.
    """

    ordered = True

    def __init__(self, *parts: tuple[Any, int]) -> None:
        self._parts = parts

    def count(self) -> int:
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
    named: Mapping[str, str] | None = None,
    most: int | None = None,
    count: int | None = None,
) -> Joined:
    """Return the names of ``rows`` in their order, with those of ``ranks`` before all others: the smallest rank first.

    ``ranks``: by the keys of names, and of ``groups``, which stand before all other names. ``last``: behind all
    others, the smallest rank last. ``names``: the names of all rows by their keys, if they are known; ``named``: of
    those in ``ranks``. ``most``: how many rows are counted at the most. ``count``: how many rows there are, if known.
    """
    groups = groups or {}
    if names is not None:
        named, count = names, len(names)
    if count is None:
        count = (rows if most is None else rows.order_by()[:most]).count()
    if named is None:
        named = dict(rows.filter(pk__in=list(ranks)).order_by().values_list("pk", "name")) if ranks else {}
    known = {key: name for key, name in named.items() if key in ranks}
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


# What is wrong now, in sentences: since when, and why.

#: How many names of each kind of trouble have a sentence; the others are counted.
MOST_NAMED: Final = 4
#: The states that are trouble, the worst first.
_WRONG: Final = ("stale", "waiting", "paused")


@dataclass(frozen=True, slots=True)
class Wrong:
    """A sentence about what is wrong. ``look``: how bad it is."""

    key: str
    text: Any
    look: str = ""


#: The names that are worst off by their state, with how many there are in that state.
Worst: TypeAlias = dict[str, tuple[list[str], int]]


def worst(reading: Reading) -> Worst:
    """Choose the names that sentences are about: of those that wait, the ones that have waited longest."""
    survey = reading.survey
    found: Worst = {}
    for state in _WRONG:
        counts = survey.listed(state).counts
        if survey.in_use is None:
            some = list(counts)[:MOST_NAMED]
            rows = SemaphoreRow.objects.using(reading.using).filter(pk__in=some)
            names = list(rows.values_list("name", flat=True)) if some else []
        else:
            known = sorted(
                (survey.in_use[key] for key in counts), key=lambda each: (-(each.longest_wait or 0.0), each.name)
            )
            names = [each.name for each in known[:MOST_NAMED]]
        found[state] = (names, len(counts))
    return found


def _all(chosen: Worst) -> list[str]:
    return [name for names, _count in chosen.values() for name in names]


def wrong_now(reading: Reading, chosen: Worst, address: Callable[[str], str]) -> list[Wrong]:
    """Return the sentences, the worst first. ``address(name)``: where a name leads."""
    known = reading.by_name(_all(chosen))
    found = []
    says = {"stale": _stale_sentence, "waiting": _queue_sentence, "paused": _paused_sentence}
    for state in _WRONG:
        names, count = chosen[state]
        said = [(name, known[name]) for name in names if name in known]
        found += [
            Wrong(
                f"{state} {key_of(name)}",
                format_html('<a href="{}">{}</a>: {}', address(name), named(name), says[state](snapshot)),
                state,
            )
            for name, snapshot in said
        ]
        if count > len(said) and said:
            more = ngettext("and %(count)d other", "and %(count)d others", count - len(said))
            more %= {"count": count - len(said)}
            link = format_html('<a href="?{}">{}</a>', urlencode({"state": state}), more)
            found.append(Wrong(f"more {state}", link, state))
    count, name = reading.disputed
    if count:
        text = ngettext(
            "{}: processes declare different numbers of slots; the larger one is the bound.",
            "{}, and {} others: processes declare different numbers of slots; the larger one is the bound.",
            count if count < 2 else 2,
        )
        link = format_html('<a href="{}">{}</a>', address(name), named(name))
        found.append(Wrong("disputed", format_html(text, link, count - 1), "disputed"))
    return found


def deadlock_sentences(reading: Reading) -> list[Wrong]:
    found = []
    for deadlock in reading.deadlocks:
        who = sorted(wait.wait_id for wait in deadlock.waits)
        text = format_html("<strong>{}</strong> {}", _("Deadlock:"), users(str(deadlock)))
        found.append(Wrong(f"deadlock {' '.join(who)}", text, "bad"))
    return found


def _stale_sentence(snapshot: SemaphoreSnapshot) -> SafeString:
    gone = [holder for holder in snapshot.holders if holder.state is SlotState.STALE]
    text = ngettext("{count} slot is stale: {who} seems gone{since}. It comes back by itself.",
                    "{count} slots are stale: {who} seem gone{since}. They come back by themselves.",
                    len(gone))  # fmt: skip
    who = format_html_join(", ", "{}", ((_who(holder),) for holder in gone[:2]))
    return format_html(text, count=len(gone), who=who, since=_silent(gone))


def _silent(gone: list[HolderSnapshot]) -> SafeString | str:
    """Return for how long the lease of the first has run out, if it has."""
    late = [each for each in gone if each.lease_left is not None and each.lease_left <= 0 and each.expires_at]
    if not late:
        return ""
    first = min(late, key=lambda each: cast("float", each.lease_left))
    left = -cast("float", first.lease_left)
    return format_html(_(", its lease ran out {} ago"), instant(left, cast("Any", first.expires_at)))


def _who(holder: HolderSnapshot) -> str:
    return ", ".join(each for each in (program_of(holder), visible(holder.label)) if each and each != EMPTY)


def _queue_sentence(snapshot: SemaphoreSnapshot) -> SafeString:
    first = max((waiter.age for waiter in snapshot.waiters), default=0.0)
    told: dict[str, Any] = {"count": snapshot.waiting, "since": lasting(first)}
    told |= {"held": snapshot.held, "slots": snapshot.slots}
    if snapshot.units is not None:
        text = ngettext("{count} waits for units, for {since}.", "{count} wait for units, the first for {since}.",
                        snapshot.waiting)  # fmt: skip
    elif snapshot.held >= snapshot.slots:
        text = ngettext("full, {held} of {slots}; {count} waits, for {since}.",
                        "full, {held} of {slots}; {count} wait, the first for {since}.",
                        snapshot.waiting)  # fmt: skip
    else:
        text = ngettext("{count} waits, for {since}, with {held} of {slots} held.",
                        "{count} wait, the first for {since}, with {held} of {slots} held.",
                        snapshot.waiting)  # fmt: skip
    said = format_html(text, **told)
    oldest = max((each for each in snapshot.holders if each.recorded), key=lambda each: each.age, default=None)
    if oldest is None:
        return said
    usual = "" if snapshot.usual_hold is None else _(", usually %(usual)s") % {"usual": length(snapshot.usual_hold)}
    by = oldest.label or oldest.host
    return format_html(_("{} Longest hold: {}{}{}."), said, lasting(oldest.age), usual,
                       format_html(_(", by {}"), users(by)) if by else "")  # fmt: skip


def _paused_sentence(snapshot: SemaphoreSnapshot) -> SafeString:
    by = format_html(_(" by {}"), users(snapshot.paused_by)) if snapshot.paused_by else ""
    since = ""
    if snapshot.paused_at is not None:
        age = max(0.0, time.time() - snapshot.paused_at.timestamp())
        since = format_html(_(" for {}"), instant(age, snapshot.paused_at))
    why = format_html(": {}", users(snapshot.paused_reason.rstrip(" ."))) if snapshot.paused_reason else ""
    words = _("draining{}{}{}.") if snapshot.draining else _("paused{}{}{}.")
    said = format_html(words, since, by, why)
    if snapshot.resumes_in is not None:
        said = format_html(_("{} Resumes in {}."), said, lasting(-snapshot.resumes_in))
    return said


class OverviewStateFilter(StateFilter):
    """Keeps the names of a state. The survey that the page needs anyway has most of them."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        reading = live.reading_of(request)
        survey = self.survey = reading.survey
        template = request.GET.get("template")
        groups = reading.standing_templates if template else []
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
            if not state or hasattr(self.told, state):  # what is not counted by template has no tile there
                yield {**choice, "state": state, "count": getattr(self.told, state, "")}


class KindFilter(admin.SimpleListFilter):
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
    #: What is told of above the list, on the page where one comes in.
    worst: Worst | None = None

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        self.reading = live.reading_of(request)
        self._names: dict[str, str] | None = None
        self._count: int | None = None
        super().__init__(request, *args, **kwargs)

    def get_filters_params(self, params: Any = None) -> Any:
        """How far back the page looks is no filter."""
        found = super().get_filters_params(params)
        found.pop(drawing.RANGE_PARAMETER, None)
        return found

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Keep what the database need not sort by for itself; no two rows have one name."""
        # Django 6.1 looks the names up, and those of ``RANKED`` are no fields.
        known = queryset.annotate(**{name: Value(0) for name in RANKED})
        ordering = [part for part in super().get_ordering(request, known) if part not in ("pk", "-pk")]
        first = ordering[0] if ordering and isinstance(ordering[0], str) else ""
        self.ranking = first if first.lstrip("-") in RANKED else None
        kept = [part for part in ordering if not isinstance(part, str) or part.lstrip("-") not in RANKED]
        kept = list(dict.fromkeys(kept))  # the model's own order is among them once more
        return kept if "name" in kept or "-name" in kept else [*kept, "name"]

    def get_ordering_field_columns(self) -> dict[int, Any]:
        """No column is the one that the list is ordered by unless one was chosen."""
        return super().get_ordering_field_columns() if ORDER_VAR in self.params else {}

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Search and filter once: what finds few names is known by these from then on."""
        found = super().get_queryset(request, exclude_parameters)
        if not (self.query or self.params.get("state") or self.params.get("template")):
            kind = self.params.get("kind")
            found, templates = found.filter(template=""), self.reading.standing_templates
            self.groups = {f"{{{each.template}": each for each in templates if kind in (None, each.kind)}
        self._count = self._known_count()
        if (self.query or self.has_active_filters) and (self._count or 0) <= FEW_NAMES:
            few = MOST_NAMES if self.params.get("state") else FEW_NAMES
            names = dict(found.order_by().values_list("pk", "name")[: few + 1])
            if len(names) <= few:
                self._names = names
                return self.root_queryset.filter(pk__in=list(names)).order_by(*found.query.order_by)
        return found

    def get_results(self, request: HttpRequest) -> None:
        """Read the names of one page, and then their snapshots."""
        queryset, most = self.queryset, SEARCHED if self.query else None
        last = self.ranking in RANKED
        names: Any = ranked(
            queryset, self._ranks(), groups=self.groups, last=last, names=self._names, named=self._named(), most=most,
            count=self._count,
        )  # fmt: skip
        self.queryset = names
        if not (self.query or self.has_active_filters or request.GET.get(PAGE_VAR, "1") != "1"):
            self.worst = worst(self.reading)
        super().get_results(request)
        count_all(self)
        self.queryset, self.result_list = queryset, self._rows(self.result_list[:])
        self.show_admin_actions = bool(self.result_count)
        self.cut_off = self.result_count == most

    def _known_count(self) -> int | None:
        """Return how many names the list has, if that is known."""
        template = self.params.get("template")
        if self.query or set(self.get_filters_params()) - {"template"}:
            return None
        if not template:
            return self.reading.without_template
        return next((each.names for each in self.reading.standing_templates if each.template == template), None)

    def _named(self) -> dict[str, str] | None:
        """Return the names in use of this list by their keys, if all are known."""
        in_use = self.reading.survey.in_use
        if in_use is None or self.query or self.params.get("state"):
            return None
        template, kind = self.params.get("template", ""), self.params.get("kind")
        return {
            key: each.name for key, each in in_use.items() if each.template == template and kind in (None, each.kind)
        }

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
            return str(cast("Any", self.model_admin).address_of(result.name))
        # Django adds the filters and the order of this page, and its number.
        query = urlencode({"template": result.known.template, PAGE_VAR: 1})
        return f"{live.address(self.model_admin, 'changelist')}?{query}"

    def _rows(self, entries: list[Any]) -> list[Any]:
        """Return the rows of names and templates."""
        names = [each for each in entries if isinstance(each, str)]
        found = self.reading.by_name([*names, *_all(self.worst or {})])
        bad = set(deadlocked(self.reading))
        rows = []
        for each in entries:
            row: Any
            if isinstance(each, TemplateSnapshot):
                row = SemaphoreRow(name=each.template, kind=each.kind)
                row.known, row.deadlocked = each, bool(each.deadlocked)
            elif each in found:  # else it was purged just now
                row = SemaphoreRow(key=key_of(each), name=each, kind=found[each].kind)
                row.known, row.deadlocked = found[each], row.key in bad
            else:
                continue
            row.trend, row.address = None, self.url_for_result(row)
            rows.append(row)
        return rows

    def draw(self, request: HttpRequest, chosen: Range) -> None:
        """Add to the rows what happened to them in a while. Of a long while, some seconds ago are new enough."""
        step = drawing.step_of(chosen.seconds, _MOST_STEPS)
        templates = [row.known.template for row in self.result_list if isinstance(row.known, TemplateSnapshot)]
        names = [row.name for row in self.result_list if not isinstance(row.known, TemplateSnapshot)]
        key = (request.get_host(), self.reading.using, chosen.name, tuple(names), tuple(templates))
        found = _drawn.get(key)
        if found is None:
            found = self.reading.trends(names, templates, window=chosen.seconds, step=step)
            if chosen is not drawing.USUAL_RANGE and found is not None:
                _drawn.keep({key: found}, time.monotonic() + chosen.light * live.REFRESH_SECONDS)
        for row in self.result_list:
            row.window = chosen.seconds
            if found is not None:
                of_template = isinstance(row.known, TemplateSnapshot)
                row.trend = found[of_template].get(row.name) or Trend(step, {}, Totals())
                row.now = self.reading.now


#: What was drawn of long ranges, as long as that is new enough: to read it costs more than all else.
_drawn: Final = live.Kept(20)
#: How many figures a small drawing has.
_MOST_STEPS: Final = 30


def lines(changelist: OverviewChangeList, headers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows, each cell as its field, its heading, what is in it, and whether that is nothing."""
    for row in changelist.result_list:
        cells = []
        for field, header in zip(changelist.list_display, headers, strict=True):
            html = lookup_field(field, row, changelist.model_admin)[2]
            cells.append((str(field), str(header["text"]), html, html in (NONE, "")))
        of_template = isinstance(row.known, TemplateSnapshot)
        key = f"{'template' if of_template else 'name'} {key_of(row.name)}"
        yield {"key": key, "cells": cells, "of_template": of_template}


def overview_answer(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Add to Django's list what stands above it, and send only the changing part to the script that asks for that."""
    if live.is_fragment(request) and response.status_code == 302:
        # Pages became fewer meanwhile. The script would take a redirect for the end of the session.
        return live.plain(_("There is no such page any more."), 404)
    if not isinstance(response, TemplateResponse) or "cl" not in (context := cast("Any", response.context_data)):
        return response
    changelist, chosen = context["cl"], drawing.chosen_range(request)
    changelist.draw(request, chosen)
    filters = {spec.parameter_name: spec.choices(changelist) for spec in changelist.filter_specs}
    headers = list(result_headers(changelist))
    wrong = deadlock_sentences(changelist.reading)
    if changelist.worst is not None:
        address = cast("Any", changelist.model_admin).address_of
        wrong += wrong_now(changelist.reading, changelist.worst, address)
    context |= {
        "refresh_seconds": live.REFRESH_SECONDS,
        "sqlsem_wrong": wrong,
        "sqlsem_glance": changelist.worst is not None,
        "sqlsem_states": filters["state"],
        "sqlsem_kinds": filters["kind"],
        "sqlsem_ranges": drawing.range_links(request, chosen),
        "sqlsem_range": chosen,
        "sqlsem_headers": headers,
        "sqlsem_sorted": sum(bool(header["sortable"] and header["sort_priority"]) for header in headers),
        "sqlsem_lines": list(lines(changelist, headers)),
        "sqlsem_template": named(request.GET.get("template", "")),
    }
    template = "admin/sqlsem/semaphorerow/_overview.html"
    if live.is_fragment(request):
        return live.fragment(request, template, context)
    # As Django's page has it: what it adds itself is drawn in the part too.
    context["sqlsem_part"] = live.part(request, template, context)
    return response
