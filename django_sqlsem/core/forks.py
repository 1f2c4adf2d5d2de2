"""Forks: what each room does before one, and after it in the parent and in the child.

A room registers itself when it is imported. What was imported first, and so lies lower, comes first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class AtFork:
    """What one room does at a fork."""

    name: str
    #: What breaks without it.
    breaks: str
    before: Callable[[], object] = _nothing
    in_parent: Callable[[], object] = _nothing
    in_child: Callable[[], object] = _nothing


rooms: list[AtFork] = []


def register(
    name: str,
    breaks: str,
    *,
    before: Callable[[], object] = _nothing,
    in_parent: Callable[[], object] = _nothing,
    in_child: Callable[[], object] = _nothing,
) -> None:
    """Have these called at every fork of this process. ``breaks``: what goes wrong in the child if they are not."""
    rooms.append(AtFork(name, breaks, before, in_parent, in_child))


def _before() -> None:
    for room in rooms:
        room.before()


def _in_parent() -> None:
    for room in reversed(rooms):
        room.in_parent()


def _in_child() -> None:
    for room in rooms:
        room.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
