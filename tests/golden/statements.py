"""The statements of the rows backend as each database gets them, for people to read and for a test to compare.

``python -m tests.golden`` writes ``rows/<vendor>.sql`` anew; ``tests/backends/test_golden.py`` compares.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import ModuleType

from django_sqlsem.backends.rows import (
    acquire,
    beacons,
    counters,
    exclusive,
    fences,
    handoff,
    queue,
    reading,
    renewal,
    statements,
)
from django_sqlsem.database.dialects import Dialect, _dialect

FOLDER = Path(__file__).parent / "rows"
#: MariaDB gets what MySQL does.
VENDORS = ("postgresql", "citus", "mysql", "sqlite", "oracle")
MODULES = (statements, acquire, beacons, exclusive, fences, handoff, queue, reading, renewal, counters)

_STATEMENT = re.compile(r"\s*(?:SELECT|INSERT|UPDATE|DELETE|WITH)\b")
#: What is filled in before a statement is run: such a constant is the pattern of what a function returns.
_PATTERN = re.compile(r"\{(?:wanted|own|suspects|kinds|kept|of_name)\}")
_TOKEN = re.compile(
    r"\((?:SELECT|UPDATE|DELETE|INSERT)\b|(?P<clause>\b(?:SELECT|FROM|WHERE|SET|RETURNING|ORDER BY|UNION ALL|VALUES|"
    r"LEFT JOIN|JOIN|USING|FOR UPDATE|FOR NO KEY)\b)|\w+|[^\w]"
)


def of_module(module: ModuleType) -> dict[str, str]:
    """Return the statements that are constants of a module; those of a dictionary by its keys too."""
    found = {}
    for name, value in vars(module).items():
        if not name.isupper():
            continue
        for key, text in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(text, str) and _STATEMENT.match(text) and not _PATTERN.search(text):
                found[f"{name.strip('_')} {key}".strip()] = text
    return found


def of_dialect(dialect: Dialect) -> dict[str, str]:
    """Return the statements that are made for a dialect."""
    begin, end = dialect.insert_ignore or ("INSERT INTO", "")
    found = {
        **{f"take {turn}": acquire.take_sql(dialect, turn, durable=False) for turn in acquire._WANTED},
        **{f"wanted before {turn}": acquire.wanted_sql(turn) for turn in acquire._WANTED},
        "take newcomer mutex": acquire.take_sql(dialect, "newcomer", durable=False, mutex=True),
        "look": acquire.look_sql(dialect),
        "sweep dead": queue.sweep_sql(dialect),
        "taken": beacons.taken_sql(dialect),
        "look bounded": acquire.look_sql(dialect, bounded=True),
        "new semaphore": f"{begin} {statements.NEW_SEMAPHORE}{end}",
        "new slot": f"{begin} {statements.NEW_SLOT}{end}",
        "place": queue.place_sql(dialect, ranked=False),
        "place ranked": queue.place_sql(dialect, ranked=True),
        **{f"look around {nth}": text for nth, text in enumerate(queue.view_sql(dialect, stay=False))},
        **{f"stay and look around {nth}": text for nth, text in enumerate(queue.view_sql(dialect, stay=True))},
        "fate": renewal.of_name(dialect, renewal._FATE),
        "take two": handoff.take_sql(2),
        "free": handoff.free_sql(dialect, 1, False),
        "free two": handoff.free_sql(dialect, 2, False),
        "free unwanted": handoff.free_sql(dialect, 1, True),
    }
    if dialect.arrays:
        found["extend arrays"] = renewal.of_name(dialect, renewal._EXTEND_ARRAYS)
    if dialect.inserting_ctes:
        found["take or stand"] = acquire.take_or_stand(dialect, durable=False)
        found["take or stand mutex"] = acquire.take_or_stand(dialect, durable=False, mutex=True)
    elif not dialect.sharded:
        found["place unless free"] = queue.place_sql(dialect, ranked=False) + acquire._UNLESS_FREE
    if dialect.dead is not None:
        found |= dict(zip(("let the dead run out", "note suspects"), beacons.burial(dialect), strict=True))
    return found


def is_used(name: str, dialect: Dialect) -> bool:
    """Whether a constant's statement is one of this dialect's."""
    used = {
        "CANDIDATES": not dialect.returning and not dialect.update_limit,
        # Pieces of statements.
        **dict.fromkeys(
            ("FREED", "STAYING", "WAITER", "DECLARED", "acquire.TAKE", "acquire.TAKE_TELLING", "EXTENDED", "WAITING"),
            False,
        ),
        **dict.fromkeys(("acquire.WANTED", "handoff.TAKE"), False),
        "PASS_IN_ONE": dialect.writing_ctes,
        "SOMEBODY": dialect.inserting_ctes,
        "handoff.LOOK": not dialect.writing_ctes,
        "PASS": not dialect.writing_ctes,
        "NOTIFY": dialect.notifies,
        "KEY_SHARE": dialect.fence == "key share",
        "WRITER": dialect.fence == "writer",
        "EXTEND_AND_TELL": dialect.returning and not dialect.arrays,
        "TELL": not dialect.returning,
        "TELL_UNLOCKED": not dialect.returning and bool(dialect.for_update),
        "STAY_AND_LOOK": dialect.writing_ctes,
        "STAY": not dialect.writing_ctes,
        "LOOK_AROUND": not dialect.writing_ctes,
        "TOUCH": dialect.locks_by_writing,
        "beacons.GONE": dialect.dead is None,
        "beacons.HOLDERS": dialect.dead is None,
        "renewal.EXTEND": not dialect.returning,
        **dict.fromkeys(
            (
                *("SIBLING", "SIBLING_WRITTEN", "SIBLING_TAKEN", "RENEWED", "BESIDE"),
                *("MARK", "MARKED", "ALONE", "EXISTS", "UNMARK"),
            ),
            dialect.fence == "sibling",
        ),
    }
    return used.get(name, used.get(name.partition(".")[2], True))


def row_texts(vendor: str) -> dict[str, str]:
    """Return every statement as a database gets it, by its name."""
    dialect = _dialect(vendor)
    texts: dict[str, str] = {}
    for module in MODULES:
        place = module.__name__.rpartition(".")[2]
        for name, text in of_module(module).items():
            if text not in texts.values() and is_used(f"{place}.{name.split()[0]}", dialect):
                texts[f"{place}.{name}"] = text
    texts |= of_dialect(dialect)
    return {name: " ".join(dialect.expand(text).split()) for name, text in texts.items()}


def laid_out(text: str) -> str:
    """Return a statement with its clauses on lines of their own, those of a query inside another one further in."""
    lines, line = [], ""
    #: For each parenthesis that is open, whether it is a query's.
    inside = [True]
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token.startswith("("):
            inside.append(bool(_STATEMENT.match(token[1:])))
        elif token == ")":
            inside.pop()
        elif inside[-1] and found["clause"] and line.strip():
            lines.append(line)
            line = "  " * (len([each for each in inside if each]) - 1)
        line += token
    return "\n".join([*lines, line])


def golden(vendor: str) -> str:
    """Return what the file of a vendor says."""
    clock = _dialect(vendor).now_sql
    head = (
        "-- The statements of the rows backend on this database. Written by python -m tests.golden: not to be edited.\n"
        f"-- {{now}} stands for {clock}\n"
    )
    wrapped = {
        name: "\n".join(
            textwrap.fill(line, 116, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)
            for line in map(str.rstrip, laid_out(text.replace(clock, "{now}")).splitlines())
        )
        for name, text in sorted(row_texts(vendor).items())
    }
    return head + "".join(f"\n-- {name}\n{text};\n" for name, text in wrapped.items())


def write() -> None:
    """Write all files anew."""
    for vendor in VENDORS:
        (FOLDER / f"{vendor}.sql").write_text(golden(vendor), encoding="utf-8")
