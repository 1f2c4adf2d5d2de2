"""Names of semaphores: what is allowed, and how a database tells two of them apart.

Patterns of names: shell-style, case-sensitive, matched in Python after the database has cut by the prefix.
"""

from __future__ import annotations

import datetime
import fnmatch
import functools
import hashlib
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from django_sqlsem.core.text import shown

MAX_NAME_LENGTH: Final = 200
MAX_SLOTS: Final = 10_000
#: Kinds of locks that have one slot, whatever an operator says.
ONE_SLOT: Final = frozenset({"mutex", "rlock", "refresh"})

#: What a name may be made of, and a name: its text, or its parts.
Part = str | int | uuid.UUID | datetime.date
Name = str | tuple[Part, ...]


def validate_name(name: object) -> str:
    """Return ``name`` if it is a legal name: 1 to 200 characters, no NUL, no lone surrogate.

    A tuple becomes the text of its parts: see ``joined()``. A str of another class (a safe string, a member of an
    enumeration) becomes the plain text that it holds. Raises ``TypeError`` or ``ValueError`` that names the value and
    what is allowed.
    """
    if isinstance(name, tuple):
        return joined(name)
    if not isinstance(name, str):
        raise TypeError(
            f"A semaphore's name must be a str or a tuple of parts, not {shown(name)} of type {type(name).__name__}."
        )
    return _checked(str.__str__(name), "")


#: A field such as decorators fill in: ``{pk}``, ``{request.user.pk}``.
_FIELD: Final = re.compile(r"\{[^\W\d]\w*(?:\.[^\W\d]\w*)*\}")


def refuse_fields(name: str) -> None:
    """Raise ``ValueError`` if a name has a field, which nothing fills in outside a decorator."""
    if (field := _FIELD.search(name)) is not None:
        raise ValueError(
            f"{name!r} has the field {field[0]}, which only a decorator fills in, from a call's arguments: outside of"
            f" one, every caller would share this very name. Write an f-string: f{name!r}. (If the braces are meant,"
            " give the name as a tuple of parts.)"
        )


def joined(parts: tuple[Any, ...]) -> str:
    """Return the one text that stands for a name made of several parts.

    The parts' texts with ``:`` between them; a ``:`` or a backslash within a part has a backslash before it, so that
    different parts never give the same text. Raises ``TypeError`` or ``ValueError`` like ``validate_name()``; see
    ``part_texts()`` for what a part may be.
    """
    return _checked(":".join(map(escaped, part_texts(parts))), ", its parts joined,")


def part_texts(parts: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the text of each part: a str that is not empty, an int, a UUID or a date (not a datetime).

    Raises ``TypeError`` or ``ValueError`` that names the part and what is allowed.
    """
    if not parts:
        raise ValueError("A semaphore's name must have at least one part, not none.")
    return tuple(_part_text(part, parts) for part in parts)


def escaped(text: str) -> str:
    """Return ``text`` as one part of a name: with a backslash before each ``:`` and each backslash."""
    return text.replace("\\", "\\\\").replace(":", "\\:")


def _part_text(part: object, parts: tuple[Any, ...]) -> str:
    # By type(), since isinstance() believes what a lazy object says of itself.
    kind = type(part)
    if issubclass(kind, str):
        if text := str.__str__(part):
            return text
        raise ValueError(f"A part of a semaphore's name must not be empty: {shown(parts)}.")
    if issubclass(kind, int) and kind is not bool:
        number: Any = part
        if number.bit_length() > 4 * MAX_NAME_LENGTH:
            raise ValueError(f"A part of a semaphore's name must have fewer digits: {shown(part)}.")
        return int.__repr__(number)
    if issubclass(kind, uuid.UUID):
        return str(part)
    if issubclass(kind, datetime.date) and not issubclass(kind, datetime.datetime):
        day: Any = part
        return datetime.date.isoformat(day)
    raise TypeError(
        f"A part of a semaphore's name must be a str, an int, a UUID or a date, not {shown(part)} of type"
        f" {kind.__name__}."
    )


def _checked(name: str, what: str) -> str:
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        cut = name if len(name) <= 60 else f"{name[:57]}..."
        raise ValueError(
            f"A semaphore's name{what} must have 1 to {MAX_NAME_LENGTH} characters, not {len(name)}: {cut!r}."
        )
    if "\x00" in name:
        raise ValueError(f"A semaphore's name must not contain a NUL character: {name!r}.")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"A semaphore's name must not contain a lone surrogate: {name!r}.") from None
    return name


def validate_slots(slots: object, *, what: str = "slots", least: int = 1, most: int = MAX_SLOTS) -> int:
    """Return ``slots`` if it is an ``int`` from 1 to 10,000, or what else is allowed.

    Raises ``TypeError`` or ``ValueError``.
    """
    if isinstance(slots, bool) or not isinstance(slots, int):
        kind = type(slots).__name__
        raise TypeError(f"{what} must be an int from {least} to {most}, not {shown(slots)} of type {kind}.")
    if not least <= slots <= most:
        raise ValueError(f"{what} must be from {least} to {most}, not {shown(slots)}.")
    return int(slots)


def validate_max_waiting(value: object, *, what: str = "max_waiting") -> int | None:
    """Return ``value`` if it is ``None`` or an ``int`` from 0; else raise ``TypeError`` or ``ValueError``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int from 0 or None, not {shown(value)} of type {type(value).__name__}.")
    if value < 0:
        raise ValueError(f"{what} must be from 0 or None, not {shown(value)}.")
    return int(value)


@dataclass(frozen=True, slots=True)
class Resource:
    """What a database locks: a name, its kind of lock, and the key that stands for the name."""

    name: str
    kind: str
    key: str


@functools.lru_cache(maxsize=4096)
def resource_for(name: str, kind: str) -> Resource:
    """Return the resource of a validated name."""
    return Resource(name, kind, key_of(name))


def key_of(name: str) -> str:
    """Return the key of a validated name, whatever kind of lock it is.

    It is the first 128 bits of the SHA-256 of the name's UTF-8, in lower-case hex: it compares the same under every
    collation, which names do not.
    """
    return hashlib.sha256(name.encode("utf-8")).hexdigest()[:32]


_SPECIAL = re.compile(r"[*?\[]")


def literal_prefix(glob: str | None) -> str | None:
    """Return what every name that matches ``glob`` begins with; ``None`` if no legal name can match."""
    if not glob:
        return ""
    special = _SPECIAL.search(glob)
    prefix = glob[: special.start()] if special else glob
    try:
        prefix.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return None if "\x00" in prefix else prefix


def matcher(glob: str | None) -> Callable[[str], bool]:
    """Return a test of names: ``fnmatch`` with case, newlines included; without a glob it passes all."""
    if not glob:
        return lambda name: True
    pattern = re.compile(fnmatch.translate(glob))
    return lambda name: pattern.match(name) is not None
