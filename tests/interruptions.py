"""Exceptions that strike at any statement of the library: a thread is walked through its lines, one point after the other."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import django_sqlsem

LIBRARY = str(Path(django_sqlsem.__file__).parent)


class SoftLimit(Exception):
    """Like Celery's SoftTimeLimitExceeded: an ordinary Exception that a signal handler raises anywhere."""


class Striking:
    """Raises ``error`` when this thread comes to the ``nth`` line of the library inside the ``with`` block.

    ``struck`` says where, or is ``None`` if the block had fewer lines. ``wanted`` may refuse frames. Lines of finalisers
    do not count: Python drops what is raised there. Nor does the end of a ``with`` statement, where CPython lets no
    signal in before the block's ``__exit__`` is called; a trace function could strike there, and a real signal cannot.
    """

    def __init__(self, nth: int, error: BaseException, wanted: Callable[[FrameType], bool] = lambda frame: True) -> None:
        self.left = nth
        self.error = error
        self.wanted = wanted
        self.struck: str | None = None

    def __enter__(self) -> Striking:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if self.struck or not code.co_filename.startswith(LIBRARY) or code.co_name == "__del__":
            return None
        return self._line if self.wanted(frame) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not self.struck and frame.f_lasti not in _ends_of_with(frame.f_code):
            self.left -= 1
            if self.left <= 0:
                self.struck = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise self.error
        return self._line


@functools.cache
def _ends_of_with(code: CodeType) -> frozenset[int]:
    """Return the offsets at which the regular end of a ``with`` statement begins: it loads three times ``None``."""
    found = set()
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        following = instructions[index : index + 3]
        if all(each.opname == "LOAD_CONST" and each.argval is None for each in following) and len(following) == 3:
            found.add(instruction.offset)
            while instructions[index - 1].opname in ("SWAP", "NOP", "POP_TOP") and index:
                index -= 1
                found.add(instructions[index].offset)
    return frozenset(found)


class StrikingAwait:
    """Awaits ``coroutine`` and throws ``error`` into it at its ``nth`` suspension. ``struck``: whether it came to that."""

    def __init__(self, coroutine: Any, nth: int, error: BaseException) -> None:
        self.coroutine = coroutine
        self.nth = nth
        self.error = error
        self.struck = False

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.coroutine.__await__()
        seen = 0
        try:
            waiting = inner.send(None)
            while True:
                seen += 1
                if seen == self.nth:
                    self.struck = True
                    waiting = inner.throw(self.error)
                else:
                    waiting = inner.send((yield waiting))
        except StopIteration as stop:
            return stop.value
