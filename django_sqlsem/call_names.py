"""The name of the semaphore that one call of a decorated function takes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import uuid
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.name_templates import JoinedTemplate, Template, django_request
from django_sqlsem.naming import escaped, joined, validate_name

if TYPE_CHECKING:
    from collections.abc import Callable

_ANYTHING: Final = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


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
        self.template: Template | JoinedTemplate = (
            Template.parse(source) if parts is None else JoinedTemplate(tuple(map(Template.parse, parts)))
        )
        for field in self.template.fields:
            self._check_root(field.root)

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
        text = self._plain_key_text(key)
        return escaped(text) if isinstance(self.template, JoinedTemplate) else text

    def _plain_key_text(self, key: object) -> str:
        if isinstance(key, str):
            return str.__str__(key)
        if isinstance(key, int) and not isinstance(key, bool):
            return int.__repr__(key)
        if isinstance(key, uuid.UUID):
            return str(key)
        raise TypeError(
            f"key {self.key!r} must return a str, an int, a UUID or a tuple of parts, not {key!r} of"
            f" {type(key).__name__}."
        )

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


def describe(wrapper: Callable[..., Any], func: Callable[..., Any]) -> None:
    """Give ``wrapper`` the signature of ``func`` for those who don't follow ``__wrapped__``, such as Celery."""
    if not isinstance(func, functools.partial) and (signature := signature_of(func)) != _ANYTHING:
        wrapper.__signature__ = _resolved(signature, func)  # type: ignore[attr-defined]


def _resolved(signature: inspect.Signature, func: Callable[..., Any]) -> inspect.Signature:
    """Evaluate annotations that are text: whoever reads them would look their names up in this library's modules.

    What names something that is not there, or for type checkers only, stays text.
    """
    names = getattr(inspect.unwrap(func), "__globals__", {})

    def value(annotation: object) -> object:
        if isinstance(annotation, str):
            with contextlib.suppress(Exception):
                # Compiled first: once a KeyboardInterrupt has struck in an eval() of text, CPython ends the process by
                # SIGINT in the end, though it was caught.
                code = compile(annotation.lstrip(" \t"), "<annotation>", "eval", dont_inherit=True)
                return eval(code, names)  # noqa: S307 - the project's own code, as inspect does
        return annotation

    parameters = [each.replace(annotation=value(each.annotation)) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=value(signature.return_annotation))


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
        return _ANYTHING


def _named(func: Callable[..., Any]) -> str:
    return f"{getattr(func, '__qualname__', None) or repr(func)}()"
