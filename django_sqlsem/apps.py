from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class SqlsemConfig(AppConfig):
    """The app: label ``sqlsem``, which names its tables, permissions and checks."""

    name = "django_sqlsem"
    label = "sqlsem"
    verbose_name = _("Locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Install what needs the models: as Django imports ``models``, by name and not before this."""
        import_module(f"{self.name}.lifecycle").install()
