"""Names with fields, such as ``sync:{request.user.pk}``, which are filled in from a call's arguments."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.http import HttpRequest
from django.utils.functional import LazyObject, empty

from django_sqlsem.core.names import escaped, joined, validate_name

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{(?P<field>[^{}]*)\}|[{}]")
_MISSING: Final = object()
#: The signature of what has none.
ANYTHING: Final = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


@dataclass(frozen=True, slots=True)
class Field:
    """One ``{root.attribute.attribute}`` of a template."""

    text: str
    path: tuple[str, ...]
    #: Is it in a part of a name made of several, which is escaped?
    in_part: bool = False

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
    @functools.lru_cache(maxsize=1024)
    def parse(source: str) -> Template:
        """Parse ``source``. Raises ``ValueError`` that names the template and the field that it does not allow."""
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

    @staticmethod
    def join(sources: tuple[str, ...]) -> Template:
        """Parse the parts of a name made of several: each is filled in, and then escaped."""
        parts: list[str | Field] = []
        for template in map(Template.parse, sources):
            parts += [":"] if parts else []
            for each in template.parts:
                parts.append(escaped(each) if isinstance(each, str) else replace(each, in_part=True))
        return Template(":".join(map(escaped, sources)), tuple(parts))

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
            part
            if isinstance(part, str)
            else self._text(part, _walk(arguments.get(part.root, _MISSING), part.path[1:]))
            for part in self.parts
        )

    async def aexpand(self, arguments: Mapping[str, object]) -> str:
        """Do as ``expand`` does, and resolve ``request.user`` through ``request.auser()``."""
        texts = []
        for part in self.parts:
            if isinstance(part, Field):
                value, rest = arguments.get(part.root, _MISSING), part.path[1:]
                if rest[:1] == ("user",) and (request := django_request(value)) is not None:
                    value, rest = await _auser(value, request), rest[1:]
                texts.append(self._text(part, _walk(value, rest)))
            else:
                texts.append(part)
        return "".join(texts)

    def _text(self, field: Field, value: Any) -> str:
        if issubclass(type(value), LazyObject):
            bool(value)  # evaluates it; only then can it be seen to be None
            value = value._wrapped
        if value is _MISSING:
            problem = "is missing in this call"
        elif value is None and field.path[:2] == ("request", "user"):
            problem = "is None in this call (nobody is logged in? Put login_required above the semaphore)"
        elif value is None:
            problem = "is None in this call. Everybody without a value would share one lock"
        elif callable(value):
            problem = "is something to call, not a value"
        elif not _has_text(type(value)):
            problem = f"is a {type(value).__name__}, which has no text of its own"
        elif text := str(value):
            return escaped(text) if field.in_part else text
        else:
            problem = "is empty in this call"
        raise ValueError(f"The field {field.text!r} of the semaphore's name {self.source!r} {problem}.")


class CallName:
    """How a decorated function's calls are named: a template, and perhaps a callable for the rest."""

    def __init__(
        self,
        source: str,
        key: Callable[..., object] | None,
        func: Callable[..., Any],
        parts: tuple[str, ...] | None = None,
    ) -> None:
        """``parts``: the templates of a name made of several, instead of ``source``.

        Raise ``ValueError`` for a template that no call could fill in, ``TypeError`` for a bad ``key``."""
        if key is not None and not callable(key):
            raise TypeError(f"key must be a callable that takes the function's arguments, not {key!r}.")
        self.func = func
        self.key = key
        self.joined = parts is not None
        self.template = Template.parse(source) if parts is None else Template.join(parts)
        for field in self.template.fields:
            self._check_root(field.root)

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for every call."""
        return self.key is None and not self.template.fields

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The function's signature; one that takes anything if it has none."""
        return signature_of(self.func)

    def name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the name for these arguments. Raises ``ValueError`` or ``TypeError`` that says what is wrong."""
        name = self.template.expand(self._arguments(args, kwargs) if self.template.fields else {})
        if self.key is not None:
            key = self.key(*args, **kwargs)
            if inspect.isawaitable(key):
                if inspect.iscoroutine(key):
                    key.close()
                raise TypeError(f"key {self.key!r} is asynchronous, but {_named(self.func)} is not.")
            name = f"{name}:{self._key_text(key)}"
        return validate_name(name)

    async def aname(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Do as ``name`` does; ``key`` may be asynchronous, and ``request.user`` is resolved by ``auser()``."""
        name = await self.template.aexpand(self._arguments(args, kwargs) if self.template.fields else {})
        if self.key is not None:
            key = self.key(*args, **kwargs)
            name = f"{name}:{self._key_text(await key if inspect.isawaitable(key) else key)}"
        return validate_name(name)

    def _key_text(self, key: object) -> str:
        if key is None or key == "":
            raise ValueError(f"key {self.key!r} returned {key!r}: calls with nothing in common would share a slot.")
        if isinstance(key, tuple):
            return joined(key)
        if isinstance(key, str):
            text = str.__str__(key)
        elif isinstance(key, int) and not isinstance(key, bool):
            text = int.__repr__(key)
        elif isinstance(key, uuid.UUID):
            text = str(key)
        else:
            raise TypeError(
                f"key {self.key!r} must return a str, an int, a UUID or a tuple of parts, not {key!r} of"
                f" {type(key).__name__}."
            )
        return escaped(text) if self.joined else text

    def _check_root(self, root: str) -> None:
        kinds = [parameter.kind for parameter in self.signature.parameters.values()]
        takes_anything = inspect.Parameter.VAR_KEYWORD in kinds
        may_get_request = root == "request" and any(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds)
        if not (root in self.signature.parameters or takes_anything or may_get_request):
            names = ", ".join(self.signature.parameters) or "none at all"
            raise ValueError(
                f"The semaphore's name {self.template.source!r} has a field of the argument {root!r}, "
                f"which {_named(self.func)} does not take; it takes {names}."
            )

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, object]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{_named(self.func)}: {error}") from None
        bound.apply_defaults()
        arguments: dict[str, object] = {}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            else:
                arguments[name] = value
        if "request" not in arguments:
            request = next((arg for arg in args[:2] if django_request(arg) is not None), None)
            if request is not None:
                arguments["request"] = request
        return arguments


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


def is_coroutine_function(func: Callable[..., Any]) -> bool:
    """Does a call of ``func`` return a coroutine: by its code, by its mark, or by its ``__call__``?"""
    return is_or_calls(iscoroutinefunction, func)


def is_or_calls(is_one: Callable[[Any], bool], func: Callable[..., Any]) -> bool:
    """Is ``func`` a function of a kind, or an object whose ``__call__`` is one?"""
    return is_one(func) or (not inspect.isroutine(func) and is_one(getattr(type(func), "__call__", None)))  # noqa: B004


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


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that calls of ``func`` must fit."""
    if isinstance(func, functools.partial):
        # method_decorator() gives its partial the __wrapped__ of the unbound method, whose first parameter is self.
        func = functools.partial(func.func, *func.args, **func.keywords)
    try:
        if sys.version_info >= (3, 14):
            import annotationlib

            return inspect.signature(func, annotation_format=annotationlib.Format.FORWARDREF)
        return inspect.signature(func)
    except (TypeError, ValueError):
        return ANYTHING


def _named(func: Callable[..., Any]) -> str:
    return f"{getattr(func, '__qualname__', None) or repr(func)}()"
