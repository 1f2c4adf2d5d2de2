"""Check the words of the documentation, and of what users read, by the rules of ``docs/styles``: ``make lint``.

Those are rules of Vale (https://vale.sh), which editors run too. Vale is not a Python package, so this reads what the
rules use of its format: ``existence`` and ``substitution``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*.md", "docs/*/*.md")
CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
#: What is no prose: code, and the addresses of links.
NO_PROSE = re.compile(r"``[^`]+``|`[^`]+`|(?<=\])\([^)]*\)|<[^>\n]+>")
GETTEXT = {"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy"}


def rules() -> list[tuple[re.Pattern[str], str, str | None]]:
    """Return what each rule finds, its message, and what is to be written instead."""
    found = []
    for path in sorted((ROOT / "docs" / "styles" / "Sqlsem").glob("*.yml")):
        rule = yaml.safe_load(path.read_text(encoding="utf-8"))
        flags = re.MULTILINE | (re.IGNORECASE if rule.get("ignorecase") else 0)
        edge = "" if rule.get("nonword") else r"\b"
        words = dict.fromkeys(rule["tokens"]) if rule["extends"] == "existence" else rule["swap"]
        for word, better in words.items():
            found.append((re.compile(f"{edge}(?:{word}){edge}", flags), rule["message"], better))
    return found


RULES = rules()


def prose(text: str) -> str:
    """Return a page with everything that is no prose blanked out, and its lines where they were."""
    return NO_PROSE.sub("x", CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text))


def texts() -> Iterator[tuple[str, int, str]]:
    """Yield what people read: file, line, text."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), 1, prose(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "django_sqlsem").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in GETTEXT:
                for part in node.args:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield str(path.relative_to(ROOT)), part.lineno, part.value


def main() -> int:
    """Print what breaks a rule. Return 1 if anything does."""
    broken = 0
    for file, first, text in texts():
        for pattern, message, better in RULES:
            for match in pattern.finditer(text):
                said = message.replace("%s", better, 1) if better is not None else message
                line = first + text.count("\n", 0, match.start())
                print(f"{file}:{line}: {said.replace('%s', match[0])}")
                broken += 1
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
