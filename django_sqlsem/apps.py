from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class SqlsemConfig(AppConfig):
    """The app: label ``sqlsem``, which names its tables, permissions and checks."""

    name = "django_sqlsem"
    label = "sqlsem"
    verbose_name = _("Locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks, other libraries, the keepers' chores, and what tests, forks and exits need."""
        from django_sqlsem import checks, contrib, lifecycle

        checks.register()
        lifecycle.install()
        contrib.register()
