"""How values are shown in messages: those that were refused, numbers of slots, a word of a command; and links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: The pages of the documentation, each at the site's usual version.
DOCUMENTATION: Final = "https://django-sqlsem.readthedocs.io/page/"
MAX_SHOWN: Final = 100
#: How many numbers in a row are told by the first and the last.
MANY_NUMBERS: Final = 8


def shown(value: object) -> str:
    """Return ``repr(value)``, cut to some 100 characters; whatever the value is, this works."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an int of many digits has no repr, and a foreign class's may fail
        bits = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{bits}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def numbers(slots: Sequence[int]) -> str:
    """Return the numbers of slots: ``1, 2, 3``, and of many in a row ``1-100``."""
    if len(slots) > MANY_NUMBERS and slots[-1] - slots[0] == len(slots) - 1:
        return f"{slots[0]}-{slots[-1]}"
    return ", ".join(map(str, slots))


def wait(count: int) -> str:
    """Return how many wait, as the end of a clause: ``1 waits``, ``3 wait``."""
    return "1 waits" if count == 1 else f"{count} wait"


def a_kind(kind: str) -> str:
    """Return a kind of lock with its article: ``a mutex``, ``an rlock``."""
    return f"an {kind}" if kind in ("rlock", "rwlock") else f"a {kind}"


def check_page(message_id: str) -> str:
    """Return the address where the messages of an id, such as ``sqlsem.W002``, are explained."""
    return f"{DOCUMENTATION}checks.html#{message_id.replace('.', '-')}".lower()


def shell_quoted(word: str) -> str:
    """Return a word as a shell takes it, always in quotes."""
    return "'" + word.replace("'", "'\\''") + "'"
