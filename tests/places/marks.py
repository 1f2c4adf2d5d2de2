"""Files through which a test and the views of a site talk: whatever kind of server, process or thread it is."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: After so many seconds a view goes on by itself, so that no server hangs for ever.
LONGEST = 100.0


class Marks:
    """Named marks in a directory."""

    def __init__(self, directory: str | None = None) -> None:
        self.directory = Path(directory or os.environ["SQLSEM_TEST_MARKS"])

    def set(self, name: str, text: str = "") -> None:
        """Set a mark, in one piece."""
        hidden = self.directory / f".{name}-{os.getpid()}-{time.monotonic_ns()}"
        hidden.write_text(text)
        hidden.rename(self.directory / name)

    def is_set(self, name: str) -> bool:
        """Whether a mark is set, or all are."""
        return (self.directory / name).exists() or (self.directory / "all").exists()

    def text(self, name: str) -> str:
        """Return what was written with a mark."""
        return (self.directory / name).read_text()

    def named(self, beginning: str) -> list[str]:
        """Return the names of the marks that begin so, sorted."""
        return sorted(path.name for path in self.directory.glob(f"{beginning}*"))

    def wait(self, name: str, timeout: float = LONGEST) -> None:
        """Wait for a mark. ``TimeoutError`` if it is not set in time."""
        deadline = time.monotonic() + timeout
        while not self.is_set(name):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the mark {name!r} was not set within {timeout} s")
            time.sleep(0.01)

    @staticmethod
    def wait_a_little() -> None:
        """Let others run, between two looks at a mark."""
        time.sleep(0.02)

    def release_all(self) -> None:
        """Let every view go on that waits for a mark."""
        self.set("all")
