"""Columns that compare and store alike on every database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import models

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    _CharField = models.CharField[Any, Any]
else:
    _CharField = models.CharField


class ExactCharField(_CharField):
    """Text that compares by its code points and stores any of Unicode, whatever the database's own collation."""

    def to_python(self, value: Any) -> Any:
        """Refuse NUL, which PostgreSQL cannot even look for: an address with one leads to no row, and to no error."""
        if isinstance(value, str) and "\0" in value:
            raise ValidationError("There is no text with NUL in it.")
        return super().to_python(value)

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the column type, with a binary collation where the default may fold case or cut characters."""
        if connection.vendor == "mysql":
            return f"varchar({self.max_length}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        if connection.vendor == "microsoft":
            # Its length is counted in UTF-16 units, of which a character may take two.
            return f"nvarchar({2 * (self.max_length or 0)}) COLLATE Latin1_General_100_BIN2"
        return super().db_type(connection)
