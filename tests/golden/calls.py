"""What the applock backend sends to SQL Server, but for the stored procedures' own texts, which are files already.

``python -m tests.golden`` writes ``applock/sent.sql`` anew; ``tests/backends/test_golden.py`` compares.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from django_sqlsem.backends.applock import calls, operator, possession, reading, sessions

FILE = Path(__file__).parent / "applock" / "sent.sql"
_HEAD = (
    "-- What the applock backend sends, but for the procedures in backends/applock/sql. Written by python -m"
    " tests.golden: not to be edited.\n"
)


def on_lock_sessions() -> dict[str, str]:
    """Return what is sent on the sessions that keep locks, by its name: their opening, and the procedures' calls."""
    called = {f"call {name.lower()}": call.text for name, call in calls.CALLS.items()}
    return {"settings": sessions.SETTINGS, "open": sessions.OPEN.format(stamp="sqlsem:process:session"), **called}


def on_other_sessions() -> dict[str, str]:
    """Return what is sent on the callers' own connections besides."""
    return {
        "views": reading.QUERY,
        "take until the end of a transaction": operator._TAKE,
        "kill": operator._KILL.format(id=1, since=2),
        "fenced": f"SELECT 1 WHERE {possession._ROW.replace('%s', '?')}",
    }


def golden() -> str:
    """Return what the file says."""
    found = [_HEAD]
    for name, text in (on_lock_sessions() | on_other_sessions()).items():
        lines = [
            textwrap.fill(line, 116, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)
            for line in text.strip().splitlines()
        ]
        found.append("\n".join([f"-- {name}", *lines]).rstrip(";") + ";\n")
    return "\n".join(found)


def write() -> None:
    """Write it anew."""
    FILE.write_text(golden(), encoding="utf-8")
