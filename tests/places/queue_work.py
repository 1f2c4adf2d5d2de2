"""What the tasks of the tests do, whatever queue they are in; and the recipes of the documentation."""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

from tests.places.tasks_notes import note
from tests.support.children import listen, say
from tests.support.databases import ROOT, OutsideCounter


def alias() -> str:
    """Where the tests have the locks and the counter."""
    return os.environ["SQLSEM_TEST_QUEUE_DATABASE"]


def count(seconds: float) -> None:
    """Be counted from outside. The first one waits for the second."""
    with OutsideCounter(alias()) as counter, counter.inside():
        deadline = time.monotonic() + 60
        while counter.peak < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(seconds)


def stick(path: str, word: str) -> None:
    """Do not end, in steps in which an exception can be raised from outside."""
    note(path, word=word)
    for _ in range(1200):
        time.sleep(0.05)


def recipe(word: str) -> str:
    """Return the documentation's Python code that contains a word."""
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    [found] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in block]
    return found


def serve(namespace: dict[str, Any]) -> None:
    """Evaluate each line there, and say the value as JSON."""
    while True:
        value = eval(listen(), namespace)  # noqa: S307 - the test's own words
        say(json.dumps(value, default=str))
