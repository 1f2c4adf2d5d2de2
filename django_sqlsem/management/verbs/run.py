"""``locks run``: a command of the system under a permit. It gets our signals, and does not outlive the permit."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from django.core.management.base import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from django_sqlsem.locks.permit import Permit


#: What a shell says of a command that it can't run, or can't find.
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
#: How long a command that lost its permit may take to end, in seconds.
GRACE: Final = 10.0
#: How often the permit is looked at, in seconds.
POLL: Final = 0.5

_FORWARDED = tuple(
    number for name in ("SIGTERM", "SIGINT", "SIGHUP") if (number := getattr(signal, name, None)) is not None
)


def system_user() -> str:
    """Return the name of the user that runs this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number without a name
        return f"uid {os.getuid()}"


class Signals:
    """What this process does with a signal: end while it waits, pass it on once the command runs."""

    def __init__(self, at_stop: int | None = None) -> None:
        #: What the command gets when an operator asks to stop; ``None``: nothing.
        self.at_stop = at_stop
        self._forward: Callable[[int], None] | None = None
        self._pending: list[int] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block, except those that whoever started us chose to ignore."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may
            return
        previous: dict[int, Any] = {}
        for number in _FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def hold_back(self) -> None:
        """From now on keep the signals for the command that is about to start."""
        self._pending = []

    def forward_to(self, forward: Callable[[int], None]) -> None:
        """From now on pass the signals on, first those that were kept."""
        self._forward = forward
        for number in self._pending or ():
            forward(number)

    def _handle(self, number: int, frame: object) -> None:
        if self._forward is not None:
            self._forward(number)
        elif self._pending is not None:
            self._pending.append(number)
        else:
            raise SystemExit(128 + number)


def run_command(command: Sequence[str], permit: Permit, signals: Signals, say: Callable[[str], None]) -> int:
    """Run ``command`` until it ends or the permit is lost, and return its exit code, 128+n if signal n ended it.

    Raises ``CommandError`` if it can't be started.
    """
    # In a terminal the command stays in our process group, so that ctrl-C and ctrl-Z reach it as ever, and
    # ctrl-C reaches it once. Elsewhere it leads a session of its own, so that a signal reaches all it started.
    shared = _in_foreground()
    signals.hold_back()
    try:
        child = subprocess.Popen(  # noqa: S603 - the operator's own command
            command,
            start_new_session=not shared,
            preexec_fn=_end_with_parent(),
        )
    except FileNotFoundError as error:
        raise CommandError(f"{command[0]}: {error.strerror}", returncode=NOT_FOUND) from error
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}", returncode=NOT_EXECUTABLE) from error
    group = not shared and hasattr(os, "killpg")

    def send(number: int) -> bool:
        """Send a signal; return whether there was anyone to get it. Number 0 only asks."""
        try:
            if group:
                os.killpg(child.pid, number)
            elif child.poll() is not None:
                return False
            else:
                child.send_signal(number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def forward(number: int) -> None:
        if child.returncode is None and not (shared and number == signal.SIGINT):
            send(number)

    signals.forward_to(forward)
    ended = threading.Event()

    def wait() -> None:
        child.wait()
        ended.set()

    threading.Thread(target=wait, name="sqlsem-run", daemon=True).start()
    asked = False
    while not ended.wait(POLL):
        if permit.stop_requested and not asked:
            asked = True
            gets = "nothing" if signals.at_stop is None else signal.Signals(signals.at_stop).name
            say(f"{permit.stop_requested_by} asks whoever holds {permit.name!r} to stop: the command gets {gets}.")
            if signals.at_stop is not None:
                send(signals.at_stop)
        if permit.lost:
            say(f"The permit for {permit.name!r} is lost: {permit.lost}. The command is being stopped.")
            _stop(send, ended)
            return _exit_code(child) or 1  # it may have ended in peace, but not under the permit
    return _exit_code(child)


def _stop(send: Callable[[int], bool], ended: threading.Event) -> None:
    send(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and send(0):  # whoever the command has started must end too
        time.sleep(0.1)
    send(getattr(signal, "SIGKILL", signal.SIGTERM))
    ended.wait()


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_with_parent() -> Callable[[], object] | None:
    """Have the system send SIGTERM to the command if this process is killed: nobody would renew its permit then."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    return functools.partial(prctl, 1, int(signal.SIGTERM))  # 1: PR_SET_PDEATHSIG, prctl(2)


def _in_foreground() -> bool:
    if not hasattr(os, "tcgetpgrp"):
        return True  # Windows: no process groups of this kind
    for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and stream.isatty():
                return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            continue
    return False
