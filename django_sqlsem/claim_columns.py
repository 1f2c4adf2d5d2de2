"""The status column of a model: which values it takes, and how they and the primary key are kept as text."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db.models import Field, Model, QuerySet

from django_sqlsem.naming import MAX_NAME_LENGTH, Resource, resource_for
from django_sqlsem.wording import shown

KIND: Final = "claim"
MAX_TEXT: Final = 255


@dataclass(frozen=True)
class StatusColumn:
    """One column of the table that has it: a proxy's, or a child's, is its parent's."""

    model: type[Model]
    field: Field[Any, Any]

    @property
    def name(self) -> str:
        """The name of the semaphore whose slots the workers on this column hold."""
        text = f"claim:{self.model._meta.db_table}.{self.field.column}"
        if len(text) <= MAX_NAME_LENGTH:
            return text
        return f"{text[:160]}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    @property
    def resource(self) -> Resource:
        """What the locks database calls it."""
        return resource_for(self.name, KIND)

    def rows(self, alias: str) -> QuerySet[Any]:
        """Return all rows of the table, whatever the model's managers leave out."""
        return QuerySet(self.model, using=alias)

    def set(self, row: Model, value: Any) -> None:
        """Set the status of an instance, in memory only."""
        setattr(row, self.field.attname, value)

    def pk_of(self, row: Model) -> Any:
        """Return the primary key, in the table that has the column, of an instance of its model or of a child's."""
        return getattr(row, self._pk.attname)

    def pk_text(self, row: Model) -> str:
        """Return that key as text. Raises ``ValueError`` if it is too long."""
        text = str(self._pk.value_to_string(row))
        if len(text) > MAX_TEXT:
            raise ValueError(f"A primary key may have up to {MAX_TEXT} characters to be claimed, not {shown(text)}.")
        return text

    def pk_from(self, text: str) -> Any:
        """Return the key that a text stands for."""
        return self._pk.to_python(text)

    def value(self, value: object, *, what: str) -> Any:
        """Return ``value`` as the field has it. Raises ``ValueError`` that says why the field can't take it."""
        try:
            python = self.field.to_python(value)
            if python is None and not self.field.null:
                raise ValidationError("it must not be null")
            choices = [key for key, _label in self.field.flatchoices or ()]
            if choices and python not in choices:
                raise ValidationError(f"its choices are {', '.join(map(shown, choices))}")
            self.field.run_validators(python)
            if len(self.text(python) or "") > MAX_TEXT:
                raise ValidationError(f"a status may have up to {MAX_TEXT} characters")
        except ValidationError as error:
            reason = "; ".join(map(str, error.messages)).rstrip(".")
            raise ValueError(f"{what}={shown(value)} is no value of {self}: {reason}.") from None
        return python

    def text(self, value: Any) -> str | None:
        """Return a status as text."""
        if value is None:
            return None
        row: Any = SimpleNamespace(**{self.field.attname: value})
        return str(self.field.value_to_string(row))

    def value_from(self, text: str | None) -> Any:
        """Return the status that a text stands for."""
        return None if text is None else self.field.to_python(text)

    @property
    def _pk(self) -> Field[Any, Any]:
        found: Field[Any, Any] = self.model._meta.pk
        return found

    def __str__(self) -> str:
        return f"{self.model._meta.label}.{self.field.name}"


def status_column(model: type[Model], field: object) -> StatusColumn:
    """Return a model's status column. Raises ``TypeError`` or ``ValueError`` that names the fields it could be."""
    if not isinstance(field, str):
        raise TypeError(f"field must be the name of a field, not {shown(field)} of type {type(field).__name__}.")
    found: Any = None
    with contextlib.suppress(FieldDoesNotExist):
        found = model._meta.get_field(field)
    if not isinstance(found, Field) or found.column is None or found.primary_key or found.many_to_many:
        names = [each.name for each in model._meta.concrete_fields if not each.primary_key]
        raise ValueError(f"field must be a column of {model._meta.label}, one of {', '.join(names)}, not {field!r}.")
    owner = found.model._meta.concrete_model
    assert owner is not None  # noqa: S101 - only abstract models have none
    return StatusColumn(owner, found)
