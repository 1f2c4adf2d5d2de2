"""What the rows say: slots that are declared differently, names that are easily taken for one another, stale slots."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Final

from django_sqlsem import queries
from django_sqlsem.doctor.findings import Finding, note, ok, warning
from django_sqlsem.doctor.patients import Patient
from django_sqlsem.models import SemaphoreRow
from django_sqlsem.naming import MAX_NAME_LENGTH

#: How many names one sentence lists.
LISTED: Final = 5
#: Names longer than this will not stay below the limit for long, if a number in them grows.
LONG: Final = MAX_NAME_LENGTH - 10


def examine(patient: Patient) -> Iterator[Finding]:
    """Look through the names."""
    yield from _slots(patient)
    yield from _lookalikes(patient)
    yield from _stale(patient)


def _slots(patient: Patient) -> Iterator[Finding]:
    rows = SemaphoreRow.objects.using(patient.alias)
    candidates = list(rows.filter(other_slots__isnull=False).values_list("name", flat=True)[:500])
    found = [each for each in queries.by_name(candidates, using=patient.alias).values() if each.other_declared_slots]
    if found:
        told = [f"{each.name!r} ({each.declared_slots} and {each.other_declared_slots})" for each in found]
        text = f"Programs disagree about the slots of {_some(told)}. The largest number is the bound."
        yield warning("sqlsem.D013", text, "Say the same slots= everywhere, or set it by `locks set NAME --slots N`.")
    else:
        yield ok("sqlsem.D013", "Programs agree about the slots of every name.")
    paused = list(rows.filter(paused=True).order_by("name").values_list("name", flat=True)[: LISTED + 1])
    if paused:
        text = f"Operators have paused {_some(map(repr, paused))}: nothing is granted."
        yield note("sqlsem.D013", text, "`locks set NAME --resume` ends that.")


def _lookalikes(patient: Patient) -> Iterator[Finding]:
    folded: dict[str, str] = {}
    alike: list[str] = []
    long: list[str] = []
    for name in SemaphoreRow.objects.using(patient.alias).values_list("name", flat=True).iterator(chunk_size=2000):
        other = folded.setdefault(fold(name), name)
        if other != name and len(alike) <= LISTED:
            alike.append(f"{other!r} and {name!r}")
        if len(name) > LONG and len(long) <= LISTED:
            long.append(f"{name[:40] + '…'!r} ({len(name)})")
    if alike:
        text = f"Names differ in case, accents or blanks only: {_some(alike)}. They are different locks."
        yield warning("sqlsem.D014", text, "If they were meant to be one, spell them the same everywhere.")
    if long:
        text = f"Names are almost as long as they may be, {MAX_NAME_LENGTH} characters: {_some(long)}."
        yield warning("sqlsem.D014", text, "Shorten them: one that is too long is an error at the acquire.")
    if not alike and not long:
        yield ok("sqlsem.D014", f"The {len(folded)} names are well apart, and short enough.")


def fold(name: str) -> str:
    """Return what a name looks like to a database that heeds neither case nor accents nor blanks at the end."""
    plain = unicodedata.normalize("NFKD", name).casefold().strip()
    return "".join(char for char in plain if not unicodedata.combining(char))


def _stale(patient: Patient) -> Iterator[Finding]:
    in_use = queries.in_use(most=500, using=patient.alias)
    stale = [f"{each.name!r} ({each.stale})" for each in in_use if each.stale]
    if stale:
        text = f"Slots belong to holders that seem gone: {_some(stale)}."
        yield note("sqlsem.D015", text, "Whoever wants them takes them. `locks list --stale` shows them.")
    else:
        yield ok("sqlsem.D015", "No slot belongs to a holder that seems gone.")


def _some(told: Iterable[str]) -> str:
    shown = list(told)
    return ", ".join(shown[:LISTED]) + (", and more" if len(shown) > LISTED else "")
