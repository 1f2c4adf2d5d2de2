"""Threads of our own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

#: For how many looks, and seconds each, ``start()`` waits for the thread to begin. One long wait would be over at once
#: in a process that was stopped meanwhile.
_LOOKS: Final = 100
_LOOK: Final = 0.05


class DaemonThread(threading.Thread):
    """A daemon thread whose ``start()`` does not wait for ever.

    Python's waits until the new thread says that it has begun. Where memory is short the thread may end before that:
    https://github.com/python/cpython/issues/140746.
    """

    def __init__(self, name: str, run: Callable[..., object], *args: object) -> None:
        super().__init__(target=run, args=args, name=name, daemon=True)
        self._started = _Begun()

    def start(self) -> None:
        """Start the thread. Raises ``RuntimeError`` if it can't start, or does not begin within 5 seconds."""
        super().start()
        if self.ident is None:
            raise RuntimeError(f"can't start new thread: {self.name!r} did not begin, as memory is short")


class _Begun(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        return any(super(_Begun, self).wait(_LOOK) for _ in range(_LOOKS))
