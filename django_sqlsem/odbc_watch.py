"""A watch over statements that a silent server does not answer: Microsoft's driver gives one up after 15 s, not 5."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Final, Protocol

#: A statement of which nothing was heard so many seconds after its answer was due costs its session.
GRACE: Final = 1.5
#: How often the watch looks, in seconds.
LOOK: Final = 0.5


class Watched(Protocol):
    """What is watched."""

    #: Since when an answer is owed, by ``time.monotonic()``; 0: none is, or it may take as long as it likes.
    asked: float
    #: For how many seconds it may be owed.
    limit: int

    def cut(self) -> None:
        """End it, also in the middle of a statement."""


class Watch:
    """A thread that runs while there is anything to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By id: each change is one step, so that a thread that is struck in it leaves no lock behind.
        self._watched: dict[int, weakref.ref[Watched]] = {}
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Watch this one from now on, until it is removed."""
        self._watched[id(watched)] = weakref.ref(watched)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sqlsem-watch", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no thread can start at the interpreter's end: the driver's own limit holds
                    self._thread = None

    def remove(self, watched: Watched) -> None:
        """Watch this one no longer."""
        self._watched.pop(id(watched), None)

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(LOOK)
            stood_still = time.monotonic() - began > LOOK + GRACE
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
            if stood_still:  # so did the others, and their answers may have come meanwhile
                continue
            for number, reference in list(self._watched.items()):
                watched = reference()
                if watched is None:
                    self._watched.pop(number, None)
                    continue
                asked = watched.asked  # once: it is answered at any moment
                if asked and time.monotonic() - asked > watched.limit + GRACE:
                    watched.cut()


watch = Watch()


def after_fork() -> None:
    """In a forked child: nothing is watched."""
    global watch
    watch = Watch()
