"""``python -m benchmarks.path``: the way of one uncontended call through the library's own files, on SQLite.

It counts what a reader has to follow: files that are entered, calls of the library's own functions, and calls that
cross from one file to another. ``--list`` prints the way itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import django
from django.conf import settings

#: How many warm calls are timed.
TIMED = 400


class Way:
    """Follows what a call enters in the library's own files, on its own thread."""

    def __init__(self, package: str) -> None:
        self._package = package
        self.calls: list[tuple[str, str]] = []
        self.crossings = 0

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(self._package):
            return
        self.calls.append((file[len(self._package) + 1 :], frame.f_code.co_qualname))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._package):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != file:
            self.crossings += 1


def follow(function: Callable[[], object], package: str) -> Way:
    """Return the way of one call."""
    way = Way(package)
    sys.setprofile(way)
    try:
        function()
    finally:
        sys.setprofile(None)
    return way


def main() -> None:
    """Print the way of a decorated call, of a ``with`` block, and of ``status()``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print each call")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.path.join(folder, "locks.sqlite3")}
        settings.configure(
            DATABASES={"default": database},
            INSTALLED_APPS=["django_sqlsem"],
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            USE_TZ=True,
        )
        django.setup()
        from django.core.management import call_command

        import django_sqlsem
        from django_sqlsem import semaphore

        call_command("migrate", verbosity=0)
        package = str(Path(django_sqlsem.__file__).parent)
        lock = semaphore("reports", slots=3)
        decorated = lock(lambda: None)

        def block() -> None:
            with lock:
                pass

        for name, function in {"decorated call": decorated, "with block": block, "status": lock.status}.items():
            for _ in range(50):
                function()
            way = follow(function, package)
            files = len({file for file, _ in way.calls})
            began, cpu = time.perf_counter(), time.thread_time()
            for _ in range(TIMED):
                function()
            took, cpu = (time.perf_counter() - began) / TIMED, (time.thread_time() - cpu) / TIMED
            lines = [
                f"{name}: {files} files, {len(way.calls)} calls, {way.crossings} crossings; "
                f"{took * 1e6:.0f} µs, {cpu * 1e6:.0f} µs of this thread's CPU"
            ]
            if options.list:
                lines += [f"    {file}: {function_name}" for file, function_name in way.calls]
            sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
