"""Names with fields, such as ``sync:{request.user.pk}``, which decorators fill in from a call's arguments."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from asgiref.sync import sync_to_async
from django.http import HttpRequest
from django.utils.functional import LazyObject, empty

from django_sqlsem.naming import escaped

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{(?P<field>[^{}]*)\}|[{}]")
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One ``{root.attribute.attribute}`` of a template."""

    text: str
    path: tuple[str, ...]

    @property
    def root(self) -> str:
        """The name of the argument that the field starts from."""
        return self.path[0]


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed name: literal text and fields, in order."""

    source: str
    parts: tuple[str | Field, ...]

    @staticmethod
    def parse(source: str) -> Template:
        """Parse ``source``. Raises ``ValueError`` that names the template and the field that it does not allow."""
        return _parse(source)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields, in order; none if the name is the same for every call."""
        return tuple(part for part in self.parts if isinstance(part, Field))

    def expand(self, arguments: Mapping[str, object]) -> str:
        """Fill the fields in from ``arguments``.

        Raises ``ValueError`` that names the field if its value is missing, ``None``, empty, or has no text of its
        own: whatever else came out would be shared by calls that have nothing in common.
        """
        return "".join(
            self._text(part, _walk(self._root(part, arguments), part.path[1:])) if isinstance(part, Field) else part
            for part in self.parts
        )

    async def aexpand(self, arguments: Mapping[str, object]) -> str:
        """Do as ``expand`` does, and resolve ``request.user`` through ``request.auser()``."""
        texts = []
        for part in self.parts:
            if isinstance(part, Field):
                value, rest = self._root(part, arguments), part.path[1:]
                if rest[:1] == ("user",) and (request := django_request(value)) is not None:
                    value, rest = await _auser(value, request), rest[1:]
                texts.append(self._text(part, _walk(value, rest)))
            else:
                texts.append(part)
        return "".join(texts)

    def _root(self, field: Field, arguments: Mapping[str, object]) -> object:
        return arguments.get(field.root, _MISSING)

    def _text(self, field: Field, value: Any) -> str:
        if issubclass(type(value), LazyObject):
            bool(value)  # evaluates it; only then can it be seen to be None
            value = value._wrapped
        if value is _MISSING:
            problem = "is missing in this call"
        elif value is None:
            problem = "is None in this call"
        elif callable(value):
            problem = "is something to call, not a value"
        elif not _has_text(type(value)):
            problem = f"is a {type(value).__name__}, which has no text of its own"
        elif text := str(value):
            return text
        else:
            problem = "is empty in this call"
        raise ValueError(f"The field {field.text!r} of the semaphore's name {self.source!r} {problem}.")


@dataclass(frozen=True, slots=True)
class JoinedTemplate:
    """The templates of a name made of several parts: each is filled in, and then escaped."""

    templates: tuple[Template, ...]

    @property
    def source(self) -> str:
        """The name as it stands before it is filled in."""
        return ":".join(escaped(template.source) for template in self.templates)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of all parts, in order."""
        return tuple(field for template in self.templates for field in template.fields)

    def expand(self, arguments: Mapping[str, object]) -> str:
        """Fill the fields in from ``arguments``: see ``Template.expand``."""
        return ":".join(escaped(template.expand(arguments)) for template in self.templates)

    async def aexpand(self, arguments: Mapping[str, object]) -> str:
        """Do as ``expand`` does, and resolve ``request.user`` through ``request.auser()``."""
        return ":".join([escaped(await template.aexpand(arguments)) for template in self.templates])


@functools.lru_cache(maxsize=1024)
def _parse(source: str) -> Template:
    parts: list[str | Field] = []
    literal, position = "", 0
    for token in _TOKEN.finditer(source):
        literal += source[position : token.start()]
        position = token.end()
        if (text := token["field"]) is not None:
            if literal:
                parts.append(literal)
            parts.append(_field(source, text))
            literal = ""
        elif len(token[0]) == 2:
            literal += token[0][0]
        else:
            raise ValueError(
                f"The semaphore's name {source!r} has a single {token[0]!r} at character {token.start() + 1}; "
                f"in a decorator write {token[0] * 2!r} for the character itself."
            )
    if literal := literal + source[position:]:
        parts.append(literal)
    return Template(source, tuple(parts))


def _field(source: str, text: str) -> Field:
    path = tuple(text.split("."))
    if not text:
        problem = "has no name; fields are never positional"
    elif "!" in text or ":" in text:
        problem = "has a conversion or a format; only plain attributes are allowed"
    elif "[" in text:
        problem = "has an index; only plain attributes are allowed"
    elif any(part.startswith("_") for part in path):
        problem = "has a leading underscore, which is private"
    elif not all(part.isidentifier() for part in path):
        problem = "is not an argument's name, with or without attributes"
    else:
        return Field(text, path)
    raise ValueError(f"The field {'{' + text + '}'!r} of the semaphore's name {source!r} {problem}.")


def _has_text(kind: Any) -> bool:
    """Does an object of this kind say more of itself than its address?"""
    return kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__


def _walk(value: object, path: tuple[str, ...]) -> object:
    for name in path:
        if value is None or value is _MISSING:
            return value
        value = getattr(value, name, _MISSING)
    return value


def django_request(value: object) -> HttpRequest | None:
    """Return the ``HttpRequest`` that ``value`` is, or that it wraps as Django REST framework's does."""
    # type() and vars(), since isinstance() and getattr() would evaluate lazy objects, with a query perhaps.
    if issubclass(type(value), HttpRequest):
        return value  # type: ignore[return-value]
    inner = getattr(value, "__dict__", {}).get("_request")
    return inner if issubclass(type(inner), HttpRequest) else None


def resolved_user(request: object) -> Any:
    """Return the user of a request if that takes no query, else ``None``."""
    attributes = getattr(request, "__dict__", {})
    user: Any = attributes.get("user")
    if issubclass(type(user), LazyObject):
        user = None if user._wrapped is empty else user._wrapped
    if user is None:
        user = next((attributes[key] for key in ("_cached_user", "_acached_user", "_user") if key in attributes), None)
    return user


async def _auser(given: object, request: HttpRequest) -> object:
    if (user := resolved_user(given)) is not None:
        return user
    if given is not request:
        # A REST framework's request authenticates in its own way, with queries.
        return await sync_to_async(lambda: getattr(given, "user", _MISSING))()
    if hasattr(request, "auser"):
        asked: object = await request.auser()
        return asked
    return getattr(request, "user", _MISSING)
