"""Exceptions that strike anywhere in the library: a thread is walked through its statements, one after the other."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import django_sqlsem

LIBRARY = str(Path(django_sqlsem.__file__).parent)


class SoftLimit(Exception):  # noqa: N818 - named like what it stands for
    """Like Celery's SoftTimeLimitExceeded: an ordinary Exception that a signal handler raises anywhere."""


class Place(NamedTuple):
    """Where something strikes: before a line, or after the call of a function that ends on it."""

    file: str
    line: int
    when: str
    function: str
    offset: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.when} {self.function}"


class Striking:
    """Raises ``error`` at the ``nth`` point that this thread reaches in the library inside the ``with`` block.

    Points are the beginning of every line, and the moment after a function has returned and before its caller has
    the result. ``struck`` is the place where it was, or ``None`` if there were fewer points. ``wanted`` may refuse
    frames, and ``but`` names places that do not count.

    A place that is passed again and again counts twice. Finalisers do not count, as Python drops what is raised
    there. Nor do points that a trace function can reach and a signal cannot: where CPython begins to leave a ``with``
    block, where it does nothing at all (``try:``), and between ``__enter__`` and the block. Nor a jump back within a
    line (a comprehension): what a signal raises there meets the handlers of its frame, and what a trace function
    raises there leaves the frame past them all, since CPython 3.12.
    """

    def __init__(
        self,
        nth: int,
        error: BaseException,
        wanted: Callable[[FrameType], bool] = lambda frame: True,
        but: frozenset[Place] = frozenset(),
    ) -> None:
        self.left = nth
        self.error: BaseException | None = error
        self.wanted = wanted
        self.but = but
        self.struck: Place | None = None
        self._raising: FrameType | None = None
        self._passed: Counter[Place] = Counter()

    def __enter__(self) -> Striking:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)
        self._raising = None

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.struck or not frame.f_code.co_filename.startswith(LIBRARY) or _in_finaliser(frame):
            return None
        return self._step if self.wanted(frame) else None

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "exception":
            self._raising = frame
        elif event == "line":
            self._raising = None
            if frame.f_lasti not in _out_of_reach(frame.f_code):
                self._count(frame, "before")
        elif event == "return" and self._raising is not frame and _returns_once(frame.f_code):
            self._count(frame, "after")
        return self._step

    def _count(self, frame: FrameType, when: str) -> None:
        place = _place(frame.f_code, frame.f_lineno, when, frame.f_lasti)
        self._passed[place] += 1
        if self._passed[place] > 2 or place in self.but:
            return
        self.left -= 1
        if self.left == 0:
            self.struck = place
            error, self.error = self.error, None
            assert error is not None
            try:
                raise error
            finally:
                del error  # through its traceback it would keep itself, and every frame, until the next collection


@functools.cache
def module_of(code: CodeType) -> str:
    """Return the path of a function's module, from the package's folder on."""
    return str(Path(code.co_filename).relative_to(LIBRARY))


# A walk passes each place thousands of times.
@functools.cache
def _place(code: CodeType, line: int, when: str, offset: int) -> Place:
    return Place(Path(code.co_filename).name, line, when, code.co_qualname, offset)


def without_tracer(error: BaseException) -> BaseException:
    """Return an exception that struck, to be kept: its traceback without the frames of the trace function.

    Nor with the frame that had returned, which some versions of CPython (3.11.2) put into the traceback of what a
    trace function raises then. A signal strikes when that frame is gone, and what it knew has gone with it.
    """
    before, traceback = None, error.__traceback__
    while traceback is not None:
        following = traceback.tb_next
        if following is not None and following.tb_frame.f_code is Striking._step.__code__:
            seen = following.tb_frame.f_locals
            traceback.tb_next = None
            if before is not None and seen["event"] == "return" and seen["frame"] is traceback.tb_frame:
                before.tb_next = None
            return error
        before, traceback = traceback, following
    return error


def _in_finaliser(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARY):
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@functools.cache
def _returns_once(code: CodeType) -> bool:
    suspends = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return not code.co_flags & suspends and code.co_name not in ("__enter__", "__exit__")


@functools.cache
def _out_of_reach(code: CodeType) -> frozenset[int]:
    """Return the offsets at which a line may begin and no signal can strike, or not as a trace function would."""
    found = set()
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        following = instructions[index : index + 3]
        if instruction.opname == "NOP":
            found.add(instruction.offset)
        elif instruction.opname == "PUSH_EXC_INFO" and following[1].opname == "WITH_EXCEPT_START":
            found.update(each.offset for each in following)
        elif len(following) == 3 and all(each.opname == "LOAD_CONST" and each.argval is None for each in following):
            found.add(instruction.offset)
            while index and instructions[index - 1].opname == "SWAP":
                index -= 1
                found.add(instructions[index].offset)
    if sys.version_info >= (3, 12):
        found.update(*_jumps_within_a_line(instructions))
    return frozenset(found)


def _jumps_within_a_line(instructions: list[dis.Instruction]) -> Iterator[tuple[int, int]]:
    """Yield where a line jumps back to itself from, and to: CPython 3.12 tells the latter, later ones the former."""
    lines = {each.offset: each.positions.lineno for each in instructions if each.positions is not None}
    for each in instructions:
        if each.opname.startswith("JUMP_BACKWARD") and lines.get(each.offset) == lines.get(each.argval):
            yield each.offset, each.argval


class StrikingAwait:
    """Awaits ``coroutine`` and throws ``error`` into it where it waits for the ``nth`` time, if it comes to that."""

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
