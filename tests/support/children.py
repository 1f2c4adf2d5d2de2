"""What child processes of tests run: ``python -m tests.support.children FUNCTION '[arguments as JSON]'``."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import threading
import time


def say(line: object) -> None:
    """Write a line for the parent's ``expect``."""
    # In one piece, whatever other threads write; past the buffer, whose lock a thread may have at the process's end.
    left = f"{line}\n".encode()
    while left:
        left = left[os.write(1, left) :]


def listen() -> str:
    """Wait for the parent's next line. Ends the process if the parent is gone."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(3)
    return line.rstrip("\n")


def hold(alias: str, name: str, slots: int = 1, lease: float | None = None) -> None:
    """Acquire, say ``held <slot> <token>``, release after a line, and say ``released``."""
    from django_sqlsem import semaphore

    with semaphore(name, slots=slots, lease=lease, using=alias) as permit:
        say(f"held {permit.slot} {permit.token}")
        listen()
    say("released")


def mend_sleep() -> None:
    """Under libfaketime, sleep on another clock: it shifts the deadline of ``time.sleep``, even to one that is none."""
    if "libfaketime" in os.environ.get("LD_PRELOAD", ""):
        time.sleep = lambda seconds: threading.Event().wait(seconds) and None  # type: ignore[assignment]


def main() -> None:
    """Set up Django and run the function, or the code, that the command line names."""
    import django

    target, arguments = sys.argv[1], json.loads(sys.argv[2])
    mend_sleep()
    django.setup()
    if re.fullmatch(r"[A-Za-z_]\w*", target):
        globals()[target](*arguments)
    elif re.fullmatch(r"[\w.]+:\w+", target):
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(*arguments)
    else:
        scope = {"__name__": "child", "args": arguments, "say": say, "listen": listen}
        exec(compile(target, "<code of a test>", "exec"), scope)


if __name__ == "__main__":
    main()
