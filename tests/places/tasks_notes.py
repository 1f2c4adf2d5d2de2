"""What the tasks of the tests write down, in a file: each line in one piece, from any process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from django_sqlsem.core import identity


def note(path: str, **what: Any) -> None:
    """Add a line to a file that the test reads."""
    with open(path, "a") as file:
        file.write(json.dumps({"label": identity.current().label, "pid": os.getpid(), **what}) + "\n")


def notes(path: str) -> list[dict[str, Any]]:
    """What has been noted so far."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if os.path.exists(path) else []
