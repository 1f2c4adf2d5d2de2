"""Forks: what each room does before one, and after it in the parent and in the child.

A room registers itself when it is imported. What was imported first, and so lies lower, comes first.

Python is not told of every fork. uWSGI imports the project in its master and forks workers in C, without
``PyOS_AfterFork_Child()`` unless ``py-call-osafterfork`` is set. So each acquire asks ``notice()`` first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeAlias

Step: TypeAlias = Callable[[], object]

_before: list[Step] = []
_in_parent: list[Step] = []
_in_child: list[Step] = []


def register(
    name: str, breaks: str, *, before: Step | None = None, in_parent: Step | None = None, in_child: Step | None = None
) -> None:
    """Have these called at every fork of this process.

    ``name`` and ``breaks`` tell readers whose they are, and what goes wrong in the child if they are not called.
    """
    _before.extend(filter(None, [before]))
    _in_parent[:0] = filter(None, [in_parent])  # what was locked last is unlocked first
    _in_child.extend(filter(None, [in_child]))


def notice() -> None:
    """Do what is done in a child, if this process was forked and Python was not told."""
    if os.getpid() != _pid:
        with _noticing:  # the other threads wait until all is done
            if os.getpid() != _pid:
                _in_new_process()


#: The process in which the steps were done last.
_pid = os.getpid()
_noticing = threading.Lock()


def _in_new_process() -> None:
    global _pid
    _take(_in_child)
    _pid = os.getpid()


def _after_fork_in_child() -> None:
    global _noticing
    _noticing = threading.Lock()
    _in_new_process()


def _take(steps: list[Step]) -> None:
    for step in steps:
        step()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _take(_before),
        after_in_parent=lambda: _take(_in_parent),
        after_in_child=_after_fork_in_child,
    )
