"""Tables in a schema per tenant, as django-tenants and its like have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def is_per_tenant(connection: BaseDatabaseWrapper, app_label: str) -> bool:
    """Whether an app has its tables in each tenant's schema, which the connection's search path decides on."""
    if not hasattr(connection, "set_tenant"):
        return False
    app = apps.get_app_config(app_label)
    names = {app.name, f"{type(app).__module__}.{type(app).__name__}"}
    types: dict[str, Any] = getattr(settings, "TENANT_TYPES", {})
    public = getattr(settings, "PUBLIC_SCHEMA_NAME", "public")
    lists = [kind.get("APPS", ()) for name, kind in types.items() if name != public]
    return any(names.intersection(each) for each in (getattr(settings, "TENANT_APPS", ()), *lists))
