"""Drawings as SVG text: escaped, and with classes instead of styles, as a strict Content-Security-Policy wants it."""

from __future__ import annotations

from typing import Final

from django.utils.html import conditional_escape
from django.utils.safestring import SafeString, mark_safe

from django_sqlsem.admin_display import users, visible

__all__ = ["drawing", "element", "number", "text", "users", "visible"]

#: The only attributes that a drawing needs; none of them runs or styles anything.
_ATTRIBUTES: Final = frozenset(
    {
        "aria-describedby", "aria-hidden", "aria-labelledby", "class", "d", "fill", "height", "id",
        "patternTransform", "patternUnits", "role", "rx", "text-anchor", "viewBox", "width",
        "x", "x1", "x2", "xmlns", "y", "y1", "y2",
    }
)  # fmt: skip


def number(value: float) -> str:
    """Return a coordinate, in as few characters as a tenth of a pixel needs."""
    return f"{value:.1f}".removesuffix(".0")


def element(tag: str, *content: str, **attributes: object) -> SafeString:
    """Return one element. A trailing ``_`` of an attribute is dropped, another one is a hyphen; ``None`` leaves it out.

    Raises ``ValueError`` for an attribute that drawings do not need, such as ``style`` or ``onclick``.
    """
    parts = []
    for key, value in attributes.items():
        name = key.removesuffix("_").replace("_", "-")
        if name not in _ATTRIBUTES:
            raise ValueError(f"{name!r} is no attribute of a drawing.")
        if value is not None:
            text = number(value) if isinstance(value, float) else str(value)
            parts.append(f' {name}="{conditional_escape(text)}"')
    inner = "".join(conditional_escape(each) for each in content)
    return mark_safe(f"<{tag}{''.join(parts)}>{inner}</{tag}>")  # noqa: S308 - every part is escaped above


def text(words: str, x: float, y: float, class_: str = "", anchor: str | None = None) -> SafeString:
    """Return a line of text."""
    return element("text", visible(words), x=float(x), y=float(y), class_=class_ or None, text_anchor=anchor)


def drawing(
    *content: str, key: str, width: float, height: float, title: str, description: str, class_: str = ""
) -> SafeString:
    """Return a whole drawing, which screen readers announce by its title and description. ``key``: part of its ids."""
    return element(
        "svg",
        element("title", visible(title), id=f"{key}-title"),
        element("desc", visible(description), id=f"{key}-about"),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        class_=f"sqlsem-drawing {class_}".strip(),
        role="img",
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-about",
        id=key,
    )
