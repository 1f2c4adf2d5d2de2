"""What the machine tells about processes: /proc of Linux. Elsewhere it is not known."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def machine_cpu() -> tuple[float, float] | None:
    """Return the busy and the total CPU seconds of the machine so far, or ``None`` where /proc does not tell."""
    with contextlib.suppress(OSError):
        numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return (sum(numbers) - numbers[3] - numbers[4]) / TICKS, sum(numbers) / TICKS
    return None


def process_threads(pid: int) -> int | None:
    """Return how many threads a process has, or ``None`` where /proc does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        return int(re.search(r"Threads:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
    return None


def open_files(pid: int, path: str) -> int | None:
    """Return how often a process has a file open, or ``None`` where /proc does not tell."""
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    count = 0
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            count += os.readlink(descriptor) == path
    return count


def sockets_to(pid: int, port: int) -> int | None:
    """Return how many TCP connections a process has to a port, or ``None`` where /proc does not tell."""
    try:
        links = [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        lines = [line.split() for table in ("tcp", "tcp6") for line in _lines(f"/proc/{pid}/net/{table}")]
    except OSError:
        return None
    inodes = {line[9] for line in lines if line[2].endswith(f":{port:04X}")}
    return sum(link.removeprefix("socket:[").removesuffix("]") in inodes for link in links)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; the name before it may have blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def family_cpu(pid: int) -> float:
    """Return the CPU seconds of a process, its children, and those of its children that have ended."""
    ticks = sum(map(int, _stat(pid)[11:15]))
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            child = int(path.parent.name)
            if parent_of(child) == pid:
                ticks += sum(map(int, _stat(child)[11:15]))
    return ticks / TICKS


def process_cpu(pid: int) -> float | None:
    """Return the CPU seconds of one process alone, or ``None`` if it has ended or /proc does not tell."""
    with contextlib.suppress(OSError):
        return sum(map(int, _stat(pid)[11:13])) / TICKS
    return None


def pids_of(*commands: str) -> list[int]:
    """Return the processes that run one of these commands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() in commands:
                found.append(int(path.parent.name))
    return found
