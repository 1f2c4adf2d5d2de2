"""The T-SQL that the package makes, read without a server: it parses, and keeps the rules that keep locks safe."""

from __future__ import annotations

import functools
import re

import pytest
from sqlfluff.core import Linter

from django_sqlsem.backends.applock.tsql import texts
from django_sqlsem.checks import sqlserver
from tests.support.databases import ROOT

PAGES = sorted((ROOT / "docs" / "backends").glob("*sql*.md"))
DECLARE = re.compile(r"\bDECLARE\s(.*?);", re.DOTALL)
FENCE = re.compile(r"^```sql\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BATCHES = texts.all_texts()
CHECKS = {f"check {name.lower()}": getattr(sqlserver, name) for name in ("FACTS", "PROBE", "SEE_LOCKS")}
EXAMPLES = {
    f"{page.name} {number}": text
    for page in PAGES
    for number, text in enumerate(FENCE.findall(page.read_text(encoding="utf-8")), 1)
}
#: One stored procedure calls another.
CALLS = re.compile(r"\bEXEC sqlsem\.[^;]*;")
#: Rules that find mistakes rather than taste: a table or alias that is not there, ``BETWEEN`` the wrong way round.
RULES = ("AL05", "AM01", "AM07", "RF01")

batches = pytest.mark.parametrize("text", BATCHES.values(), ids=BATCHES)
ours = pytest.mark.parametrize("text", (BATCHES | CHECKS).values(), ids=BATCHES | CHECKS)


@functools.cache
def linter() -> Linter:
    return Linter(dialect="tsql", rules=list(RULES))


def faults(text: str) -> list[str]:
    """Return what sqlfluff says of a text whose parameters are marked by ``?``; an example may have ``GO`` lines."""
    found = linter().lint_string(text.replace("?", "0"))
    return [f"line {each.line_no}: {each.rule_code()} {each.desc()}" for each in found.violations]


@pytest.mark.parametrize("text", (BATCHES | CHECKS | EXAMPLES).values(), ids=BATCHES | CHECKS | EXAMPLES)
def test_it_parses(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize("word", ["END", "BEGIN", "THEN", "WHEN", "(", ")"], ids=lambda word: f"without {word}")
def test_what_is_broken_is_found(word: str) -> None:
    """Whether the test above would notice: a text loses its first such word, or its last."""
    pattern = re.compile(rf"\b{word}\b" if word.isalpha() else re.escape(word))
    text = BATCHES["prove_recorded"]
    places = list(pattern.finditer(text))
    for place in (places[0], places[-1]):
        assert faults(text[: place.start()] + text[place.end() :]), f"nobody misses {word!r} at {place.start()}"


def parameters(text: str) -> str:
    """Return the parameters of a procedure."""
    return text.partition("\nAS\n")[0].partition("\n")[2] if text.startswith("ALTER PROCEDURE") else ""


def without_text(text: str) -> str:
    """Return a batch without its strings and comments."""
    return re.sub(r"--[^\n]*|'(?:[^']|'')*'", "''", text)


def declared(code: str) -> list[list[str]]:
    """Return the variables that each DECLARE of a text makes."""
    types = r"(?:n?varchar|varbinary|n?char|bigint|int|bit|datetime2|uniqueidentifier)\b"
    return [re.findall(rf"@(\w+)\s+{types}", each) for each in DECLARE.findall(code)]


@ours
def test_every_variable_is_declared_once(text: str) -> None:
    """In one spelling: where the server's collation tells cases apart, variables' names do too."""
    code = re.sub(r"@(?:Resource|LockMode|LockOwner|LockTimeout|DbPrincipal) =|@@\w+", "", without_text(text))
    code = CALLS.sub(lambda call: re.sub(r"@\w+ = ", "", call[0]), code)
    names = [name for each in [*declared(code), *declared(f"DECLARE {parameters(text)};")] for name in each]
    assert len(names) == len(set(names))
    assert set(re.findall(r"@(\w+)", code)) == set(names)


@ours
def test_no_variable_is_used_by_the_statement_that_declares_it(text: str) -> None:
    """SQL Server knows a variable from the next statement on; a stand-in may be less strict."""
    code = without_text(text)
    for statement, names in zip(DECLARE.findall(code), declared(code), strict=True):
        assert [name for name in names if len(re.findall(rf"@{name}\b", statement)) > 1] == []


@ours
def test_what_the_parser_lets_pass(text: str) -> None:
    code = without_text(text)
    counts = {code.count(words) for words in ("BEGIN TRY", "END TRY", "BEGIN CATCH", "END CATCH")}
    assert len(counts) == 1
    assert not re.search(r"(?:;|BEGIN)\s*@\w", code), "an assignment without SET"


@ours
def test_no_row_count_hides_the_result(text: str) -> None:
    body = text.partition("\nAS\nBEGIN\n")[2] if text.startswith("ALTER PROCEDURE") else text
    alone = body.startswith("SELECT ") and body.count(";") == 1  # nothing else is counted
    assert alone or body.startswith("SET NOCOUNT ON;")


@ours
def test_every_call_says_all_it_means(text: str) -> None:
    """The procedures' defaults are traps: a transaction as the owner, a session's own lock timeout."""
    text = CALLS.sub("", text)
    calls = re.findall(r"\bEXEC[^;]*;", text)
    assert len(calls) == text.count("EXEC ") == len(re.findall(r"sp_(?:get|release)applock", text))
    for call in calls:
        assert re.match(r"EXEC @\w+ = sys\.sp_(get|release)applock\s+@Resource = @\w+,", call)
        assert "@LockOwner = 'Session'" in call
        assert "@DbPrincipal = 'public'" in call
        assert ("sp_getapplock" in call) == ("@LockTimeout = " in call) == ("@LockMode = " in call)


@ours
def test_nothing_that_a_driver_or_a_stand_in_trips_over(text: str) -> None:
    code = without_text(text).upper()
    for word in ("GROUP BY", "MERGE", "WAITFOR", "XACT_ABORT", "RAISERROR", "PRINT", "BEGIN TRAN", "GO\n"):
        assert word not in code


@batches
def test_the_marks_are_the_parameters(text: str) -> None:
    batch = next((each for each in texts.all_batches().values() if each.text == text), None)
    wanted = batch.parameters if batch else ()
    assert without_text(text).count("?") == len(wanted) == len(set(wanted))
