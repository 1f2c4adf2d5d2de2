"""The columns of the overview."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models.functions import Coalesce
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_sqlsem.admin_display import EMPTY, declared, snapshot_of
from django_sqlsem.dashboard.cells import drawn
from django_sqlsem.dashboard.overview import kind_of
from django_sqlsem.dashboard.svg import users, visible
from django_sqlsem.durations import duration
from django_sqlsem.plain import Lately

if TYPE_CHECKING:
    from django_sqlsem.models import SemaphoreRow

#: What stands where nothing is to be said, and a reader of screens passes over.
NONE: Final = mark_safe('<span class="sqlsem-none" aria-hidden="true">·</span>')

COLUMNS: Final = (
    "lock_name", "cells", "held", "waiting", "stale", "utilisation", "longest_hold", "longest_wait", "turned_away",
    "kind_word", "declared",
)  # fmt: skip


class OverviewColumns:
    """One method per column; each shows the row's snapshot, which was read with the page."""

    def action_checkbox(self, row: SemaphoreRow) -> SafeString:
        """Return what Django does, without a template for each row."""
        return format_html(
            '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="{}">',
            ACTION_CHECKBOX_NAME,
            row.pk,
            _("Choose %(name)s for an action") % {"name": visible(row.name)},
        )

    @admin.display(description=gettext_lazy("name"), ordering="name")
    def lock_name(self, row: SemaphoreRow) -> SafeString:
        """Return the name, whatever characters it is made of."""
        return users(row.name)

    @admin.display(description=gettext_lazy("kind"), ordering="kind")
    def kind_word(self, row: SemaphoreRow) -> str:
        """Return the kind's own word."""
        return kind_of(row.kind)

    @admin.display(description=gettext_lazy("slots"), ordering=Coalesce("operator_slots", "declared_slots"))
    def cells(self, row: SemaphoreRow) -> SafeString | str:
        """Return the slots as cells, with what an operator must know of all of them in a word."""
        snapshot = snapshot_of(row)
        if snapshot is None:
            return EMPTY
        shown: SafeString | str = drawn(snapshot)
        if snapshot.tokens is not None:
            shown = _("%(tokens)d tokens") % {"tokens": snapshot.tokens}
        badges = []
        if getattr(row, "sqlsem_deadlocked", False):
            badges.append(("bad", _("deadlock")))
        if snapshot.paused:
            badges.append(("draining", _("draining")) if snapshot.draining else ("paused", _("paused")))
        if snapshot.operator_slots is not None:
            badges.append(("operator", _("set by operator")))
        for state, word in badges:
            shown = format_html('{} <span class="sqlsem-badge sqlsem-{}">{}</span>', shown, state, word)
        return shown

    @admin.display(description=gettext_lazy("held"), ordering="held")
    def held(self, row: SemaphoreRow) -> SafeString | str:
        """Return how many slots are taken by live permits, of how many."""
        snapshot = snapshot_of(row)
        if snapshot is None or snapshot.tokens is not None:
            return NONE
        return _("%(held)d of %(slots)d") % {"held": snapshot.held, "slots": snapshot.slots}

    @admin.display(description=gettext_lazy("stale"), ordering="stale")
    def stale(self, row: SemaphoreRow) -> SafeString | str:
        """Return how many slots belong to holders that seem gone."""
        snapshot = snapshot_of(row)
        return _marked(snapshot.stale if snapshot else 0, "stale")

    @admin.display(description=gettext_lazy("waiting"), ordering="waiting")
    def waiting(self, row: SemaphoreRow) -> SafeString | str:
        """Return how many threads and tasks wait."""
        snapshot = snapshot_of(row)
        return _marked(snapshot.waiting if snapshot else 0, "waiting")

    @admin.display(description=gettext_lazy("utilisation"))
    def utilisation(self, row: SemaphoreRow) -> SafeString | str:
        """Return which part of the slots' time they were held in the last hour, as a bar with the number."""
        used = _lately(row).utilisation
        if used is None:
            return NONE
        percent = _percent(used)
        return format_html(
            '<span class="sqlsem-used"><svg class="sqlsem-meter" viewBox="0 0 100 10" preserveAspectRatio="none"'
            ' aria-hidden="true" focusable="false"><rect class="sqlsem-meter-all" width="100" height="10"/>'
            '<rect class="sqlsem-meter-used" width="{}" height="10"/></svg> {}</span>',
            f"{100 * used:.1f}",
            percent,
        )

    @admin.display(description=gettext_lazy("longest hold"))
    def longest_hold(self, row: SemaphoreRow) -> SafeString | str:
        """Return the longest hold of this moment and the last hour."""
        return _length(_lately(row).longest_hold)

    @admin.display(description=gettext_lazy("longest wait"))
    def longest_wait(self, row: SemaphoreRow) -> SafeString | str:
        """Return the longest wait of this moment and the last hour."""
        return _length(_lately(row).longest_wait)

    @admin.display(description=gettext_lazy("turned away"))
    def turned_away(self, row: SemaphoreRow) -> SafeString | str:
        """Return how many got nothing within their timeout in the last hour."""
        return _marked(_lately(row).turned_away or 0, "away")

    @admin.display(description=gettext_lazy("declared"))
    def declared(self, row: SemaphoreRow) -> SafeString | str:
        """Return what the code says, and whether processes disagree."""
        snapshot = snapshot_of(row)
        return declared(snapshot) if snapshot else EMPTY


def _lately(row: SemaphoreRow) -> Lately:
    return cast("Any", row).__dict__.get("sqlsem_lately") or Lately()


def _marked(count: int, state: str) -> SafeString:
    return format_html('<span class="sqlsem-count sqlsem-{}">{}</span>', state, count) if count else NONE


def _length(seconds: float | None) -> SafeString | str:
    return duration(seconds).replace(" ", "\N{NO-BREAK SPACE}") if seconds else NONE


def _percent(part: float) -> str:
    if 0 < part < 0.01:
        return _("< 1 %")
    return _("%(percent)d %%") % {"percent": int(100 * part)}
