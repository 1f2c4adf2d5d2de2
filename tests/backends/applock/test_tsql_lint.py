"""The stored procedures and the other T-SQL of the package, read without a server.

They parse, fit together, and keep the rules that keep locks safe.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import pytest
from django.db.models import CharField
from sqlfluff.core import Linter

from django_sqlsem.backends.applock import calls, install
from django_sqlsem.backends.applock.sessions import SETTINGS
from django_sqlsem.checks import sqlserver
from django_sqlsem.database.cursors import size_of
from django_sqlsem.models import ExactCharField, SemaphoreRow, SlotRow, WaiterRow
from tests.golden.calls import on_lock_sessions, on_other_sessions
from tests.support.databases import ROOT

PAGES = sorted((ROOT / "docs" / "backends").glob("*sql*.md"))
DECLARE = re.compile(r"\bDECLARE\s(.*?);", re.DOTALL)
FENCE = re.compile(r"^```sql\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = dict(calls.files())
SENT = on_lock_sessions() | on_other_sessions()
CHECKS = {f"check {name.lower()}": getattr(sqlserver, name) for name in ("FACTS", "PROBE", "SEE_LOCKS")}
#: What is around the procedures' own texts.
INSTALLED = {
    f"batch {nth}": text
    for nth, text in enumerate(install.batches(), 1)
    if not re.search(r"^ALTER PROCEDURE sqlsem\.(?!version)", text, re.MULTILINE)
}
REMOVED = {f"removal {nth}": text for nth, text in enumerate(install.batches(drop=True), 1)}
EXAMPLES = {
    f"{page.name} {number}": text
    for page in PAGES
    for number, text in enumerate(FENCE.findall(page.read_text(encoding="utf-8")), 1)
}
#: One stored procedure calls another.
CALL = re.compile(r"\bEXEC (?:@\w+ = )?sqlsem\.(\w+)\s*([^;]*);")
#: The call of a lock's procedure: where the return code goes, which one, and its arguments.
LOCK = re.compile(r"\bEXEC @(\w+) = sys\.sp_(get|release)applock ([^;]*);")
TYPE = r"(?:n?varchar|varbinary|n?char|bigint|int|bit|datetime2|uniqueidentifier|TABLE)\b"
PARAMETER = re.compile(r" +@(\w+) (\w+(?:\(\w+\))?)( = [^,\n ]+)?( OUTPUT)?,?(?: +--.*)?")
#: Rules that find mistakes rather than taste: a table or alias that is not there, ``BETWEEN`` the wrong way round.
RULES = ("AL05", "AM01", "AM07", "RF01")
#: Where a lock is asked for and it does not matter whether it was granted: without it, newcomers are not kept out yet.
UNCHECKED = {("internal_upgrade_1", "@gate")}

files = pytest.mark.parametrize("name", FILES)
ours = pytest.mark.parametrize("text", (FILES | SENT | CHECKS).values(), ids=FILES | SENT | CHECKS)


@functools.cache
def linter() -> Linter:
    return Linter(dialect="tsql", rules=list(RULES))


def faults(text: str) -> list[str]:
    """Return what sqlfluff says of a text whose parameters are marked by ``?``; an example may have ``GO`` lines."""
    # What it does not know.
    text = re.sub(r" WITH \(DELAYED_DURABILITY = ON\)|-- noqa: PRS", "", text)
    text = re.sub(r"\bKILL [0-9]+;", "SELECT 0;", text)
    found = linter().lint_string(text.replace("?", "0"))
    return [f"line {each.line_no}: {each.rule_code()} {each.desc()}" for each in found.violations]


EVERYTHING = FILES | SENT | CHECKS | EXAMPLES | INSTALLED | REMOVED


@pytest.mark.parametrize("text", EVERYTHING.values(), ids=EVERYTHING)
def test_it_parses(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize("word", ["END", "BEGIN", "THEN", "WHEN", "(", ")"], ids=lambda word: f"without {word}")
def test_what_is_broken_is_found(word: str) -> None:
    """Whether the test above would notice: a text loses its first such word, or its last."""
    pattern = re.compile(rf"\b{word}\b" if word.isalpha() else re.escape(word))
    text = re.sub(r"^-- .*\n| +-- .*$", "", FILES["internal_release_1"], flags=re.MULTILINE)
    places = list(pattern.finditer(text))
    for place in (places[0], places[-1]):
        assert faults(text[: place.start()] + text[place.end() :]), f"nobody misses {word!r} at {place.start()}"


# --- The procedures and their parameters ---


@dataclass(frozen=True)
class Parameter:
    """One parameter as a procedure declares it."""

    type: str
    optional: bool
    output: bool


def parameters(name: str) -> dict[str, Parameter]:
    """Return the parameters of a procedure, in their order. Anything else between its name and ``AS`` is a mistake."""
    head, _as, _body = FILES[name].partition("\nAS\n")
    _comment, _create, lines = head.partition(f"CREATE OR ALTER PROCEDURE sqlsem.{name}")
    found = {}
    for line in filter(None, lines.split("\n")):
        match = PARAMETER.fullmatch(line)
        assert match, line
        found[match[1]] = Parameter(match[2], bool(match[3]), bool(match[4]))
    return found


def needed(known: dict[str, Parameter]) -> set[str]:
    """Return which parameters have to be given."""
    return {name for name, each in known.items() if not (each.optional or each.output)}


def body(name: str) -> str:
    """Return what a procedure does, without its strings and comments."""
    return without_text(FILES[name].partition("\nAS\n")[2])


def without_text(text: str) -> str:
    """Return a batch without its strings and comments."""
    return re.sub(r"--[^\n]*|'(?:[^']|'')*'", "''", text)


def arguments(text: str) -> list[tuple[str, str, bool]]:
    """Return the arguments of a call: the parameter's name, if it is given; the value; and whether it is an output."""
    found = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(?:@(\w+) = )?(.*?)( OUTPUT)?", each, re.DOTALL)
        assert match, each
        found.append((match[1] or "", match[2], bool(match[3])))
    return found


@files
def test_a_file_is_one_procedure_of_its_name(name: str) -> None:
    text = FILES[name]
    assert re.findall(r"\bPROCEDURE (\S+)", text) == [f"sqlsem.{name}"]
    assert text.startswith("-- "), "what it does comes first"
    assert f"CREATE OR ALTER PROCEDURE sqlsem.{name}\n" in text
    assert not re.search(r"^\s*GO\s*$", text, re.MULTILINE)


def test_what_is_no_interface_ends_with_a_number() -> None:
    """A caller that waits calls the others of its own version after an upgrade: signatures stay as they are."""
    internal = set(FILES) - set(install.PUBLIC)
    assert internal == {name for name in FILES if re.fullmatch(r"internal_[a-z]+_[0-9]+", name)}
    assert set(install.PUBLIC) < set(FILES)
    assert install.VERSION not in FILES


@files
def test_whom_it_calls_is_there_and_gets_what_it_takes(name: str) -> None:
    code = body(name)
    assert len(CALL.findall(code)) == code.count("EXEC sqlsem.") + len(re.findall(r"EXEC @\w+ = sqlsem\.", code))
    for callee, given in CALL.findall(code):
        assert re.fullmatch(r"internal_[a-z]+_[0-9]+", callee)
        wanted, got = parameters(callee), arguments(given)
        names = [each or list(wanted)[nth] for nth, (each, _value, _output) in enumerate(got)]
        assert len(names) == len(set(names))
        assert set(names) <= set(wanted)
        assert needed(wanted) <= set(names)
        for each, (_name, value, output) in zip(names, got, strict=True):
            assert output <= wanted[each].output, each
            assert output <= value.startswith("@"), each


@pytest.mark.parametrize("name", calls.CALLS)
def test_a_call_from_python_gives_what_the_procedure_takes(name: str) -> None:
    call = calls.CALLS[name]
    match = re.fullmatch(r"EXEC sqlsem\.(\w+) (@\w+ = \?(?:, @\w+ = \?)*)(, @answer = 1)?", call.text)
    assert match
    wanted = parameters(match[1])
    assert tuple(re.findall(r"@(\w+)", match[2])) == call.parameters
    assert len(set(call.parameters)) == len(call.parameters)
    # It answers by one row: always, or when it is asked to.
    answer = Parameter("bit", optional=True, output=False)
    assert wanted.pop("answer", None) in ({answer} if match[3] else {None, answer})
    asked = re.search(r"IF @answer = 1\s+SELECT [^;]*;\s*(?:RETURN @\w+;\s*)?$", body(match[1]))
    always = re.search(r";\s+SELECT @?[^;]*;\s*$|@answer = 1;\s+END;\s*$", body(match[1]))
    assert asked if match[3] else asked or always
    assert needed(wanted) <= set(call.parameters)
    for each in call.parameters:
        # Of whole numbers the value decides: a bit is sent as one too.
        declared = "int" if wanted[each].type == "bit" else wanted[each].type
        assert calls.types(match[1])[each] == declared, each
    assert call.sizes() == tuple(size_of(calls.types(match[1])[each]) for each in call.parameters)


def test_every_procedure_is_called() -> None:
    from_python = {re.findall(r"sqlsem\.(\w+)", call.text)[0] for call in calls.CALLS.values()}
    called = from_python | {callee for name in FILES for callee, _given in CALL.findall(body(name))}
    assert called == set(FILES) - set(install.PUBLIC)


# --- Variables ---


def declared(code: str) -> list[list[str]]:
    """Return the variables that each DECLARE of a text makes."""
    return [re.findall(rf"@(\w+)\s+{TYPE}", each) for each in DECLARE.findall(code)]


@pytest.mark.parametrize("name", FILES | SENT | CHECKS)
def test_every_variable_is_declared_once_and_before_it_is_used(name: str) -> None:
    """In one spelling: where the server's collation tells cases apart, variables' names do too."""
    known = list(parameters(name)) if name in FILES else []
    code = body(name) if name in FILES else without_text((SENT | CHECKS)[name])
    code = re.sub(r"@(?:Resource|LockMode|LockOwner|LockTimeout|DbPrincipal) =|@@\w+", "", code)
    code = re.sub(r"\bEXEC sqlsem\.[^;]*;?", lambda call: re.sub(r"@\w+ = ", "", call[0]), code)
    names = [*known, *(each for names in declared(code) for each in names)]
    assert len(names) == len(set(names))
    assert set(re.findall(r"@(\w+)", code)) | set(known) == set(names)
    for each in set(names) - set(known):
        first = re.search(rf"@{each}\b", code)
        assert first, each
        assert re.match(rf"\s+{TYPE}", code[first.end() :]), f"@{each} is used before it is declared"


@files
def test_every_parameter_is_used(name: str) -> None:
    for each in parameters(name):
        assert re.search(rf"@{each}\b", body(name)), each


@ours
def test_no_variable_is_used_by_the_statement_that_declares_it(text: str) -> None:
    """SQL Server knows a variable from the next statement on; a stand-in may be less strict."""
    code = without_text(text)
    for statement, names in zip(DECLARE.findall(code), declared(code), strict=True):
        assert [name for name in names if len(re.findall(rf"@{name}\b", statement)) > 1] == []


def assignments(statement: str) -> list[tuple[str, str]]:
    """Return the variables that a SELECT sets, and to what; the last one with whatever follows."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(statement):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0 and re.match(r",\s+@\w+ = ", statement[place:]):
            parts.append(statement[start:place])
            start = place + 1
    found = [re.match(r"\s*@(\w+) = (.*)", part, re.DOTALL) for part in (*parts, statement[start:])]
    return [(match[1], match[2]) for match in found if match]


@files
def test_no_assignment_looks_at_another_of_the_same_statement(name: str) -> None:
    """Nobody promises in which order they are made: SQL Server goes from left to right, a stand-in does all at once."""
    for statement in re.findall(r"\bSELECT (?:TOP \(1\) )?(@\w+ = [^;]*);", body(name)):
        found = assignments(statement)
        for nth, (variable, _value) in enumerate(found):
            for other, (_variable, value) in enumerate(found):
                assert nth == other or not re.search(rf"@{variable}\b", value), f"@{variable} in {statement}"


# --- What the parser lets pass ---


@ours
def test_what_the_parser_lets_pass(text: str) -> None:
    code = without_text(text)
    counts = {code.count(words) for words in ("BEGIN TRY", "END TRY", "BEGIN CATCH", "END CATCH")}
    assert len(counts) == 1
    assert not re.search(r"(?:;|BEGIN)\s*@\w", code), "an assignment without SET"
    while found := re.search(r"\bCASE\b(?:(?!\bCASE\b|\bEND\b).)*\bEND\b", code, re.DOTALL):
        code = code.replace(found[0], "0")
    assert not re.search(r"\bEND;\s*ELSE\b", code), "the ELSE of nothing"


@ours
def test_no_row_count_hides_the_result(text: str) -> None:
    if text == SETTINGS:
        return  # it answers nothing
    start = text.partition("\nAS\n")[2] or text
    alone = re.match(r"\s*(?:SELECT|EXEC) ", start) and start.strip().count(";") <= 1  # nothing else is counted
    assert alone or start.startswith(("SET NOCOUNT ON;", "SET NOCOUNT ON; "))


@pytest.mark.parametrize(
    "text", (FILES | on_lock_sessions() | CHECKS).values(), ids=FILES | on_lock_sessions() | CHECKS
)
def test_nothing_that_a_driver_or_a_stand_in_trips_over(text: str) -> None:
    code = without_text(text).upper()
    for word in ("GROUP BY", "MERGE", "WAITFOR", "RAISERROR", "PRINT", "GO\n", "CURSOR", "GOTO"):
        assert word not in code
    assert "%S" not in text.upper()


@ours
def test_columns_of_two_collations_are_never_compared(text: str) -> None:
    """That is error 468 on SQL Server, and none on a stand-in. A table variable's own is the database's default.

    Source: "Collation precedence" in Microsoft's documentation. Variables and literals give way to any column.
    """
    for table in re.findall(r"@\w+ TABLE \(((?:[^()]|\([^()]*\))*)\)", text):
        for column in re.findall(r"\w+ n?(?:var)?char\b[^,]*", table):
            assert "COLLATE Latin1_General_100_BIN2" in column, column  # as ``ExactCharField`` has it


def test_every_text_in_the_procedures_tables_has_one_collation() -> None:
    for model in (SemaphoreRow, SlotRow, WaiterRow):
        columns = [getattr(each, "target_field", each) for each in model._meta.concrete_fields]
        assert {type(each) for each in columns if isinstance(each, CharField)} == {ExactCharField}


@files
def test_names_are_counted_in_utf_16_units(name: str) -> None:
    """A database's own collation may count a supplementary character as one; Python, resources and columns: as two.

    Source: "Collation and Unicode support" in Microsoft's documentation, on supplementary characters.
    """
    text = FILES[name].partition("\nAS\n")[2]
    counted = re.findall(r"\b(?:SUBSTRING|LEN|LEFT|UNICODE|CHARINDEX|PATINDEX)\(([^()]*)\)", text)
    for each in counted:
        if re.search(r"@held\b|@name\b|@entry\b|\bname\b", each):
            known = each in ("@name, 40", "@entry, 32") or re.fullmatch(r"@entry, (?:33, 32|65, 6|71, 4)", each)
            assert "COLLATE Latin1_General_100_BIN2" in each or known, each  # what is shown, or before any name


@ours
def test_nothing_needs_a_newer_database_than_mssql_django_does(text: str) -> None:
    """A server is newer than its databases, if they have come from an old one: ``TRY_CAST`` needs level 110.

    What needs a higher level, or a later server than 2016, by Microsoft's documentation of each.
    """
    newer = r"STRING_SPLIT|OPENJSON|GENERATE_SERIES|STRING_AGG|TRANSLATE|CONCAT_WS|TRIM|GREATEST|LEAST|DATETRUNC"
    newer += r"|DATE_BUCKET|APPROX_\w+|JSON_OBJECT|JSON_ARRAY|REGEXP_\w+|BIT_COUNT|LEFT_SHIFT|RIGHT_SHIFT"
    assert re.findall(rf"\b(?:{newer})\s*\(|\bIS (?:NOT )?DISTINCT FROM\b", without_text(text).upper()) == []


@files
def test_what_is_thrown_has_no_format(name: str) -> None:
    """THROW takes a single per cent sign for the start of one, and shows a blank text."""
    text = FILES[name].partition("\nAS\n")[2]
    for message in re.findall(r"@why = (CONCAT\([^;]*);", text):
        bare = re.sub(r"REPLACE\([^%]*, N'%', N'%%'\)", "", message)
        assert not re.search(r"LEFT\(@name|N'\. ', @why", bare), message
    assert not re.findall(r"THROW \d+, N'[^']*%", text)


# --- Locks ---


@files
def test_every_lock_call_says_all_it_means(name: str) -> None:
    """The procedures' defaults are traps: a transaction as the owner, a session's own lock timeout.

    By place, in the order of the procedure's own parameters: resource, mode, owner, milliseconds, principal.
    """
    code = FILES[name].partition("\nAS\n")[2]
    found = LOCK.findall(code)
    assert len(found) == len(re.findall(r"\w+applock\b", without_text(code)))
    owner = "'Transaction'" if name.startswith("internal_fence_") else "'Session'"
    for _code, which, given in found:
        values = [each.strip() for each in given.split(",")]
        assert re.fullmatch(r"@\w+", values[0])
        if which == "release":
            assert values[1:] == ["'Session'", "'public'"]
            continue
        _resource, mode, whose, patience, principal = values
        assert re.fullmatch(r"@mode|'(?:Exclusive|Update|Shared|IntentExclusive|IntentShared)'", mode)
        assert (whose, principal) == (owner, "'public'")
        assert re.fullmatch(r"@(?:wait|timeout|left)|0", patience)


@files
def test_every_refusal_is_seen(name: str) -> None:
    """A return code below 0 is no error, and stops nothing by itself."""
    code = FILES[name].partition("\nAS\n")[2]
    outputs = {each for each, parameter in parameters(name).items() if parameter.output}
    for call in LOCK.finditer(code):
        target, which, given = call.groups()
        resource = given.partition(",")[0].strip()
        if which == "release":
            assert target == "done", "what is not held is no error"
            continue
        if target == "done":
            assert (name, resource) in UNCHECKED
            continue
        later = code[call.end() :]
        looked_at = re.search(rf"@{target}\b(?! = sys\.)", later)
        overwritten = re.search(rf"EXEC @{target} = ", later)
        assert target in outputs or looked_at, call[0]
        assert overwritten is None or (looked_at and looked_at.start() < overwritten.start()), call[0]


@files
def test_what_is_released_is_known_to_be_held(name: str) -> None:
    """Else the server raises 1223: ``APPLOCK_MODE`` says so, or a variable that is set when it is granted."""
    code = FILES[name].partition("\nAS\n")[2]
    for call in LOCK.finditer(code):
        _target, which, given = call.groups()
        if which == "release":
            resource = re.escape(given.partition(",")[0].strip())
            before = code[max(0, call.start() - 800) : call.start()]
            known = rf"APPLOCK_MODE\(N'public', {resource}, N'Session'\)|@(?:rc >= 0|head = 1|named = 1)\b"
            assert re.search(known, before), call[0]


@files
def test_what_asks_about_locks_asks_publics_and_the_sessions(name: str) -> None:
    code = FILES[name]
    asked = re.findall(r"APPLOCK_MODE\(((?:[^()]|\([^()]*\))*)\)", code)
    tested = re.findall(r"APPLOCK_TEST\(([^()]*)\)", code)
    assert len(asked) + len(tested) == len(re.findall(r"\bAPPLOCK_\w+", code))
    for each in asked:
        assert re.fullmatch(r"N'public', ([@\w.]+|CONCAT\(slot, N'-', @base\)), N'Session'", each)
    for each in tested:
        assert re.fullmatch(r"N'public', [@\w.]+, (N'Exclusive'|@mode), N'Session'", each)


# --- Rows ---


@files
def test_tables_are_those_of_the_schema_that_the_installer_knows(name: str) -> None:
    """Elsewhere a table without a schema would be the procedure's own; the installer puts the real one in."""
    code = body(name)
    assert re.findall(r"(?<!dbo\.)\bsqlsem_\w+", code) == []
    assert set(re.findall(r"\bdbo\.(\w+)", code)) <= {"sqlsem_semaphore", "sqlsem_slot", "sqlsem_waiter"}
    for text in install.batches(tables="app"):
        assert not re.search(r"\bdbo\.sqlsem_", text)


@files
def test_a_transaction_is_over_at_the_end(name: str) -> None:
    """Whatever fails in it: the ``CATCH`` rolls back what is open, and only if the transaction is ours."""
    code = body(name)
    begun = code.count("BEGIN TRANSACTION")
    assert begun == code.count("COMMIT TRANSACTION")
    assert code.count("@@TRANCOUNT > 0 ROLLBACK TRANSACTION") == code.count("ROLLBACK TRANSACTION") == bool(begun)
    called = {callee for other in FILES for callee, _given in CALL.findall(body(other))}
    assert not begun or name not in called or "@@TRANCOUNT = 0" in code  # others are called on our own sessions


ON_THE_WAY = [f"internal_{name}_1" for name in ("try", "acquire", "release", "prove", "upgrade")]


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_statistics_compile_nothing_anew_on_the_way_to_a_lock(name: str) -> None:
    for statement in body(name).split(";"):
        if re.search(r"\b(?:FROM|JOIN) dbo\.", statement):
            assert "OPTION (KEEPFIXED PLAN)" in statement, statement


def test_what_people_call_knows_tables_that_are_not_there() -> None:
    """Such an error ends the procedure that names the table, so that only its caller can say what is missing."""
    for name in ("acquire", "release", "status"):
        assert "dbo." not in body(name)
        assert re.search(r"ERROR_NUMBER\(\) IN \(207, 208\)\s+THROW 59304", re.sub(r"--.*", "", FILES[name]))
