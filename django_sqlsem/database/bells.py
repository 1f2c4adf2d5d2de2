"""Waking a process of the same host without its database: a datagram to a socket that only this host can see.

A process that hands a slot to a waiter rings the waiter's bell, and says what it got. That is believed, as it names the
waiter's permit id, which is random, and which only those know who may read the lock tables.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Final

from django_sqlsem.core.clocks import boot_id

#: What a bell may say, in bytes; PostgreSQL takes notes of less than 8000.
MAX_NOTE: Final = 7900

_PREFIX: Final = "bell:"


def near() -> str:
    """Return the beginning of the channels that processes here can ring; empty where there are no bells.

    Linux keeps abstract sockets apart by network namespace: two containers cannot ring one another.
    """
    if not sys.platform.startswith("linux"):
        return ""  # pragma: no cover
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:  # pragma: no cover
        return ""
    return f"{_PREFIX}{boot_id()[:8]}-{namespace}:"


class Bell:
    """One process's bell: a datagram socket whose address is the process's channel."""

    def __init__(self, process_id: str) -> None:
        prefix = near()
        self.channel = ""
        self._socket: socket.socket | None = None
        if prefix:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            listener.setblocking(False)  # unlike SOCK_NONBLOCK, which gevent's sockets pass over and wait
            try:
                listener.bind(_address(prefix + process_id))
            except OSError:
                listener.close()
                return
            self._socket, self.channel = listener, prefix + process_id

    def fileno(self) -> int | None:
        """Return the descriptor that becomes readable when somebody rings."""
        return None if self._socket is None else self._socket.fileno()

    def heard(self) -> list[str]:
        """Return the permit ids that were rung for since the last call."""
        heard = []
        with contextlib.suppress(BlockingIOError):
            while self._socket is not None:
                heard.append(self._socket.recv(MAX_NOTE).decode("ascii", "replace"))
        return heard

    def close(self) -> None:
        """Take the bell away."""
        listener, self._socket = self._socket, None
        self.channel = ""
        if listener is not None:
            listener.close()


#: The socket that rings, once there is one; a dictionary, as two threads may make it at the same time.
_ringers: dict[str, socket.socket] = {}


def ring(channel: str, note: str) -> bool:
    """Wake the process at ``channel``. Return whether it will hear: it is here, and has not too much to hear yet."""
    if not channel.startswith(_PREFIX):
        return False
    ringer = _ringers.get("") or _new_ringer()
    try:
        ringer.sendto(note.encode("ascii"), _address(channel))
    except OSError:
        return False
    return True


def stop() -> None:
    """Close what rings. It is made anew when it is needed."""
    ringer = _ringers.pop("", None)
    if ringer is not None:
        ringer.close()


def _new_ringer() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    kept = _ringers.setdefault("", made)
    if kept is not made:
        made.close()
    return kept


def _address(channel: str) -> bytes:
    return b"\0sqlsem-" + channel.encode("ascii")
