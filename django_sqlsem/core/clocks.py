"""The host's boot clock: it counts suspend, and no one can set it. Tests move this process's reading of it ahead."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import time
from pathlib import Path

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)
if _BOOTTIME is None and sys.platform == "darwin":  # pragma: no cover
    # On macOS it goes on while the machine sleeps (clock_gettime(3)); time.monotonic() does not.
    _BOOTTIME = time.CLOCK_MONOTONIC

#: Pauses are of random lengths, so that no two processes stay in step. It is not ``random`` itself: a program may seed
#: that in each of its processes.
chance = random.SystemRandom()

#: Seconds by which ``testing.clock()`` has moved this process ahead. It only grows: this clock never goes back.
_ahead = 0.0
#: How many of them the process stood still, so that nothing was renewed.
_stood_still = 0.0


def boot_now() -> float:
    """Seconds since the host booted, time spent suspended included."""
    if _BOOTTIME is None:  # pragma: no cover - Windows, whose monotonic clock counts sleep
        return time.monotonic() + _ahead
    return time.clock_gettime(_BOOTTIME) + _ahead


def boot_now_us() -> int:
    """Microseconds since the host booted, time spent suspended included."""
    return host_now_us() + (ahead_us() if _ahead else 0)


def ahead_us() -> int:
    """By how many microseconds a test has moved this process ahead of its host; 0 outside of tests."""
    return round(_ahead * 1e6)


def stood_still() -> float:
    """For how many seconds altogether a test had this process stand still; 0 outside of tests."""
    return _stood_still


def move(seconds: float, *, still: bool) -> None:
    """Move this process ahead, for a test; ``still``: nothing ran meanwhile."""
    global _ahead, _stood_still
    _ahead += seconds
    if still:
        _stood_still += seconds


def host_now_us() -> int:
    """Microseconds since the host booted, the same for all its processes: the clock of a database that has none."""
    if _BOOTTIME is None:  # pragma: no cover - Windows
        return time.monotonic_ns() // 1000
    return time.clock_gettime_ns(_BOOTTIME) // 1000


@functools.cache
def boot_id() -> str:
    """A name for this boot of this host, the same in every process and container on it.

    Empty where the system offers none: there a slot held at a crash stays held until its lease has run out.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        pass
    if sys.platform == "darwin":  # pragma: no cover
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()[:36]  # noqa: S603
    if sys.platform == "win32":  # pragma: no cover
        import winreg

        path = r"SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management\PrefetchParameters"
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
            return str(winreg.QueryValueEx(key, "BootId")[0])
    return ""  # pragma: no cover
