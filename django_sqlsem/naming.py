"""Names of semaphores: what is allowed, and how a database tells two of them apart."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Final

from django_sqlsem.wording import shown

MAX_NAME_LENGTH: Final = 200
MAX_SLOTS: Final = 10_000


def validate_name(name: object) -> str:
    """Return ``name`` if it is a legal name: 1 to 200 characters, no NUL, no lone surrogate.

    A str of another class (a safe string, a member of an enumeration) becomes the plain text that it holds. Raises
    ``TypeError`` or ``ValueError`` that names the value and what is allowed.
    """
    if not isinstance(name, str):
        raise TypeError(f"A semaphore's name must be a str, not {shown(name)} of type {type(name).__name__}.")
    name = str.__str__(name)
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        cut = name if len(name) <= 60 else f"{name[:57]}..."
        raise ValueError(f"A semaphore's name must have 1 to {MAX_NAME_LENGTH} characters, not {len(name)}: {cut!r}.")
    if "\x00" in name:
        raise ValueError(f"A semaphore's name must not contain a NUL character: {name!r}.")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"A semaphore's name must not contain a lone surrogate: {name!r}.") from None
    return name


def validate_slots(slots: object, *, what: str = "slots") -> int:
    """Return ``slots`` if it is an ``int`` from 1 to 10,000; else raise ``TypeError`` or ``ValueError``."""
    if isinstance(slots, bool) or not isinstance(slots, int):
        kind = type(slots).__name__
        raise TypeError(f"{what} must be an int from 1 to {MAX_SLOTS}, not {shown(slots)} of type {kind}.")
    if not 1 <= slots <= MAX_SLOTS:
        raise ValueError(f"{what} must be from 1 to {MAX_SLOTS}, not {shown(slots)}.")
    return int(slots)


@dataclass(frozen=True, slots=True)
class Resource:
    """What a database locks: a name, its kind of lock, and the key that stands for the name."""

    name: str
    kind: str
    key: str


@functools.lru_cache(maxsize=4096)
def resource_for(name: str, kind: str) -> Resource:
    """Return the resource of a validated name.

    The key is the first 128 bits of the SHA-256 of the name's UTF-8, in lower-case hex: it compares the same
    under every collation, which names do not.
    """
    return Resource(name, kind, hashlib.sha256(name.encode("utf-8")).hexdigest()[:32])
