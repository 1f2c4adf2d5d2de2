"""The acts on the page of one lock: which buttons there are, and where they lead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import Error as DatabaseError
from django.http import HttpResponseRedirect
from django.urls import path, reverse
from django.utils.translation import gettext as _

from django_sqlsem import admin_actions, admin_configure
from django_sqlsem import admin_confirm as confirm
from django_sqlsem.dashboard import live, svg
from django_sqlsem.exceptions import BackendError
from django_sqlsem.naming import ONE_SLOT, key_of

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.urls import URLPattern

    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot

#: By the names that actions have on lists, which are those of the functions.
ACTS: Final[dict[str, Any]] = {
    act.__name__: act
    for act in (
        admin_actions.stop,
        admin_actions.revoke,
        admin_actions.purge_stale,
        admin_configure.set_slots,
        admin_configure.pause,
        admin_configure.resume,
        admin_configure.drain,
    )
}


@dataclass(frozen=True, slots=True)
class Button:
    """One button: what it sends, what is on it, and, for who does not see what it is beside, what it is about."""

    value: str
    text: str
    label: str
    dangerous: bool = False


class Acts:
    """What a user may do to one lock, as buttons. They belong to the form of ``_acts_form.html``.

    ``url`` is where the form goes, ``lock`` the buttons of the lock as a whole; ``beside(holder)`` those of a holder.
    """

    def __init__(self, model_admin: Any, request: HttpRequest, snapshot: SemaphoreSnapshot) -> None:
        self._snapshot = snapshot
        self._may = {act for act in ACTS if permitted(model_admin, request, act)}
        self.url = _address(model_admin, "act", key_of(snapshot.name))
        self.lock = self._of_the_lock()

    def __bool__(self) -> bool:
        """Whether the user may do anything at all."""
        return bool(self._may)

    def beside(self, holder: HolderSnapshot) -> list[Button]:
        """Return the buttons of one holder: it is meant by its slot and token."""
        wanted = [("purge_stale", _("Purge"), False)]
        if not holder.expired:
            wanted = [("revoke", _("Revoke"), True)]
            if _can_be_asked(holder):
                wanted.insert(0, ("stop", _("Ask to stop"), False))
        return [
            Button(
                f"{act} {holder.slot} {holder.token}",
                text,
                _("%(act)s: %(holder)s") % {"act": text, "holder": svg.visible(str(holder))},
                dangerous,
            )
            for act, text, dangerous in wanted
            if act in self._may
        ]

    def _of_the_lock(self) -> list[Button]:
        snapshot, live = self._snapshot, [each for each in self._snapshot.holders if not each.expired]
        unasked = [each for each in live if _can_be_asked(each)]
        texts = {
            "stop": (_("Ask all to stop"), len(unasked) > 1),
            "set_slots": (_("Set slots"), snapshot.tokens is None and snapshot.kind not in ONE_SLOT),
            "pause": (_("Pause"), not snapshot.paused),
            "resume": (_("Resume"), snapshot.paused),
            "drain": (_("Drain"), not snapshot.paused or bool(unasked)),
        }
        return [
            Button(act, text, _("%(act)s: %(name)s") % {"act": text, "name": svg.visible(snapshot.name)})
            for act, (text, useful) in texts.items()
            if useful and act in self._may
        ]


def _can_be_asked(holder: HolderSnapshot) -> bool:
    # Without a record there is no place for the wish.
    return holder.recorded and not holder.stop_requested


def permitted(model_admin: Any, request: HttpRequest, act: str) -> bool:
    """Whether the user may do this act, as the action of a list is allowed or not."""
    needed = ACTS[act].allowed_permissions
    return any(getattr(model_admin, f"has_{permission}_permission")(request) for permission in needed)


def refuse(model_admin: Any, request: HttpRequest) -> None:
    """Answer 403 to who sends a list an act without permission: Django would say that none was chosen."""
    if request.method == "POST":
        for act in request.POST.getlist("action"):
            if act in ACTS and not permitted(model_admin, request, act):
                raise PermissionDenied


def urls(model_admin: Any) -> list[URLPattern]:
    """Return where the buttons lead."""

    def act_view(request: HttpRequest, object_id: str) -> HttpResponse:
        return _view(model_admin, request, unquote(object_id))

    name = f"{model_admin.opts.app_label}_{model_admin.opts.model_name}_act"
    return [path("<path:object_id>/act/", model_admin.admin_site.admin_view(act_view), name=name)]


def _view(model_admin: Any, request: HttpRequest, key: str) -> HttpResponse:
    """Ask, and act after the confirmation; then show the page of the lock again, with what happened."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    back = HttpResponseRedirect(_address(model_admin, "change", key))
    if request.method != "POST":  # somebody had to log in again, say
        return back
    try:
        act = confirm.button(request)[0] or request.POST.get("action", "")
        if act not in ACTS:
            raise confirm.DamagedFormError
        if not permitted(model_admin, request, act):
            raise PermissionDenied
        chosen = model_admin.get_queryset(request).filter(pk=key)
        if confirm.confirmed(request) is None and not chosen.exists():
            return cast("HttpResponse", model_admin._get_obj_does_not_exist_redirect(request, model_admin.opts, key))
        return ACTS[act](model_admin, request, chosen) or back
    except (confirm.DamagedFormError, ValidationError):
        model_admin.message_user(request, _("The form came back damaged: nothing was done."), messages.ERROR)
    except confirm.ChangedError as error:
        confirm.report_changed(model_admin, request, [str(error)])
    except (BackendError, DatabaseError) as error:
        model_admin.message_user(request, live.first_line(error), messages.ERROR)
    return back


def _address(model_admin: Any, view: str, key: str) -> str:
    name = f"admin:{model_admin.opts.app_label}_{model_admin.opts.model_name}_{view}"
    return reverse(name, args=[quote(key)], current_app=model_admin.admin_site.name)
