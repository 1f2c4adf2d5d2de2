"""How far back a page looks: ``?range=24h`` in its address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from django.utils.translation import gettext_lazy

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.utils.functional import _StrPromise


#: The parameter of addresses.
PARAMETER: Final = "range"


@dataclass(frozen=True, slots=True)
class Range:
    """How far back the page looks. ``light``: so many answers to the script leave it out."""

    name: str
    words: _StrPromise
    title: _StrPromise
    seconds: float
    light: int


RANGES: Final = (
    Range("5m", gettext_lazy("5 min"), gettext_lazy("Last 5 minutes"), 300.0, 4),
    Range("1h", gettext_lazy("1 h"), gettext_lazy("Last hour"), 3600.0, 4),
    Range("24h", gettext_lazy("24 h"), gettext_lazy("Last 24 hours"), 86400.0, 19),
    Range("7d", gettext_lazy("7 d"), gettext_lazy("Last 7 days"), 7 * 86400.0, 99),
)
USUAL: Final = RANGES[1]
#: The seconds that one figure is about.
_STEPS: Final = (60.0, 120.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 6 * 3600.0)


def chosen(request: HttpRequest) -> Range:
    """Return what the address says; the usual one for what is none."""
    wanted = request.GET.get(PARAMETER)
    return next((each for each in RANGES if each.name == wanted), USUAL)


def links(request: HttpRequest, chosen: Range) -> list[tuple[_StrPromise, str, bool]]:
    """Return the ranges as links: words, address, and whether it is the one that is shown."""
    found = []
    for each in RANGES:
        parameters = request.GET.copy()
        parameters[PARAMETER] = each.name
        found.append((each.words, f"?{parameters.urlencode()}", each is chosen))
    return found


def step_of(window: float, most: int) -> float:
    """Return the seconds that one figure is about, so that there are ``most`` of them at the most."""
    return next((each for each in _STEPS if window / each <= most), _STEPS[-1])
