"""Sleeping until a deadline, a word from another thread, or something to read."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
from collections.abc import Sequence


class Alarm:
    """Wakes one sleeping thread. ``ring`` may be called at any moment, in finalisers and signal handlers too."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self.asleep = False

    def ring(self) -> None:
        """Wake the sleeper, if it sleeps."""
        if self.asleep:
            with contextlib.suppress(OSError):  # it has rung already, or has been closed
                self._sender.send(b".")

    def sleep(self, seconds: float, descriptors: Sequence[int]) -> set[int]:
        """Sleep for so long at the most; ``asleep`` must have been set before the last look at what there is to do.

        Returns those of ``descriptors`` that are readable, or broken.
        """
        own = self._receiver.fileno()
        try:
            ready = _wait([own, *descriptors], max(0.0, seconds))
        finally:
            self.asleep = False
        if own in ready:
            with contextlib.suppress(BlockingIOError):
                self._receiver.recv(4096)
        return ready - {own}

    def close(self) -> None:
        """Close both ends."""
        self._receiver.close()
        self._sender.close()


def _wait(descriptors: Sequence[int], seconds: float) -> set[int]:
    if hasattr(select, "poll"):
        poller = select.poll()
        for each in descriptors:
            poller.register(each, select.POLLIN)
        # Rounded up, so that it never turns round and round in the last millisecond.
        return {number for number, _ in poller.poll(int(seconds * 1000) + 1)}
    with selectors.DefaultSelector() as selector:  # pragma: no cover - Windows
        for each in descriptors:
            selector.register(each, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(seconds)}
