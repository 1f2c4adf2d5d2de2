"""Running a command under a semaphore: its signals, its exit code, and its end if the permit is lost."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext, gettext_noop

from django_sqlsem import mutex, queries, semaphore
from django_sqlsem.core import identity
from django_sqlsem.core.durations import UNSET
from django_sqlsem.core.names import ONE_SLOT
from django_sqlsem.exceptions import AcquireTimeoutError, SemaphoreError
from django_sqlsem.locks.permit import Permit
from django_sqlsem.management import arguments
from django_sqlsem.management.verbs import Verb, system_user

#: What a shell says of a command that it can't run, or can't find.
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
#: How long a command that lost its permit may take to end, in seconds.
_GRACE: Final = 10.0
#: How often the permit is looked at, in seconds.
_POLL: Final = 0.5
_PASSED_ON: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]


@arguments.checked
def _stop_signal(text: str) -> int | None:
    if text == "none":
        return None
    found = getattr(signal, f"SIG{text.upper().removeprefix('SIG')}", None)
    if not isinstance(found, signal.Signals):
        raise ValueError(gettext("%(text)s is no signal: write TERM, INT, USR1, or none.") % {"text": repr(text)})
    return int(found)


class Run(Verb):
    """One run of a command. A signal ends this process while it waits, and is passed on once the command runs."""

    help = gettext_noop(
        "Runs a command under a semaphore. It gets SIGTERM, SIGINT and SIGHUP, and is stopped if the permit is lost."
    )
    _child: subprocess.Popen[bytes] | None = None
    #: Signals that came while the command was being started; ``None``: it is not, yet.
    _pending: list[int] | None = None

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        options = "[--slots N] [--timeout AGE] [--stop-signal SIGNAL] [--label TEXT] [--database ALIAS]"
        parser.usage = f"%(prog)s NAME {options} -- COMMAND..."
        arguments.add_name(parser)
        told = gettext("how many may run; default: as declared, else 1")
        parser.add_argument("--slots", metavar="N", type=arguments.slots, help=told)
        told = gettext("how long to wait: 0, 90s, none; default: as configured")
        parser.add_argument("--timeout", metavar="AGE", type=arguments.timeout, default=UNSET, help=told)
        told = gettext("what operators are shown as the work; default: the command and its first word")
        parser.add_argument("--label", metavar="TEXT", default="", help=told)
        told = gettext("what the command gets when an operator asks to stop: INT, USR1, none; default: TERM")
        parser.add_argument("--stop-signal", metavar="SIGNAL", type=_stop_signal, default=signal.SIGTERM, help=told)

    def handle(self) -> None:
        """Run the command under a permit, and end with its exit code."""
        name, slots, using = self.given.name, self.given.slots, self.given.database
        if not self.given.command:
            told = gettext("Which command? Write it behind --, as in: locks run nightly -- ./backup.sh")
            raise CommandError(told, returncode=2)
        known = queries.semaphore(name, using=using)
        if known and known.kind in ONE_SLOT and slots in (None, 1):
            lock = mutex(name, timeout=self.given.timeout, using=using)._as(known.kind)
        else:
            lock = semaphore(name, slots, timeout=self.given.timeout, using=using)
        label = self.given.label or identity.command_label(self.given.command)
        # In a terminal the command stays in our process group, so that ctrl-C and ctrl-Z reach it as ever, and
        # ctrl-C reaches it once. Elsewhere it leads a session of its own, so that a signal reaches all it started.
        self._shared = _in_foreground()
        with self._signals(), identity.activity(label, system_user()):
            try:
                with lock._literal().acquire() as permit:
                    self._start()
                    code = self._watch(permit)
            except AcquireTimeoutError as error:
                raise CommandError(str(error), returncode=arguments.EXIT_BUSY) from error
            except (SemaphoreError, ImproperlyConfigured) as error:
                raise CommandError(str(error)) from error
        if code:
            sys.exit(code)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals inside the block, except those that this process was started to ignore."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may
            return
        taken = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._handle) for number in taken}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self._child is not None:
            self._forward(number)
        elif self._pending is not None:
            self._pending.append(number)
        else:
            raise SystemExit(128 + number)

    def _start(self) -> None:
        """Start the command. Raises ``CommandError`` if it can't be."""
        self._pending = []
        try:
            self._child = subprocess.Popen(  # noqa: S603 - the operator's own command
                self.given.command, start_new_session=not self._shared, preexec_fn=_end_with_parent()
            )
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            raise CommandError(f"{self.given.command[0]}: {error.strerror}", returncode=code) from error
        for number in self._pending:
            self._forward(number)

    def _watch(self, permit: Permit) -> int:
        """Wait until the command ends or the permit is lost; return its exit code, 128+n if signal n ended it."""
        child: Any = self._child
        ended = threading.Event()

        def wait() -> None:
            child.wait()
            ended.set()

        threading.Thread(target=wait, name="sqlsem-run", daemon=True).start()
        asked = lost = False
        while not lost and not ended.wait(_POLL):
            if permit.stop_requested and not asked:
                asked = True
                self._pass_stop_on(permit)
            if permit.lost:
                lost = True
                told = gettext("The permit for %(name)s is lost: %(reason)s. The command is being stopped.")
                self.stderr.write(told % {"name": repr(permit.name), "reason": permit.lost})
                self._stop(ended)
        code: int = child.returncode if child.returncode >= 0 else 128 - child.returncode
        return code or int(lost)  # a command that ended with 0, but without its permit, has failed

    def _pass_stop_on(self, permit: Permit) -> None:
        number = self.given.stop_signal
        told = {"by": permit.stop_requested_by, "name": repr(permit.name)}
        if number is None:
            text = gettext("%(by)s asks the holder of %(name)s to stop: the command gets nothing.")
        else:
            text = gettext("%(by)s asks the holder of %(name)s to stop: the command gets %(signal)s.")
            told["signal"] = signal.Signals(number).name
        self.stderr.write(text % told)
        if number is not None:
            self._send(number)

    def _send(self, number: int) -> bool:
        """Send a signal; return whether there was anyone to get it. Number 0 only asks."""
        child: Any = self._child
        try:
            if not self._shared and hasattr(os, "killpg"):
                os.killpg(child.pid, number)
            elif child.poll() is not None:
                return False
            else:
                child.send_signal(number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _forward(self, number: int) -> None:
        child: Any = self._child
        if child.returncode is None and not (self._shared and number == signal.SIGINT):
            self._send(number)

    def _stop(self, ended: threading.Event) -> None:
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and self._send(0):  # what the command has started must end too
            time.sleep(0.1)
        self._send(getattr(signal, "SIGKILL", signal.SIGTERM))
        ended.wait()


def _end_with_parent() -> Callable[[], object] | None:
    """Have Linux send SIGTERM to the command if this process is killed: its permit would not be renewed then."""
    try:
        return functools.partial(ctypes.CDLL(None).prctl, 1, int(signal.SIGTERM))  # 1: PR_SET_PDEATHSIG, prctl(2)
    except (OSError, AttributeError, TypeError):  # another system: Windows has no library without a name
        return None


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
