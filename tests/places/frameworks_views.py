"""Views of API frameworks, for tests of their busy answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import User
from django.http import JsonResponse
from django.urls import include, path
from django.utils.decorators import method_decorator
from ninja import NinjaAPI, Schema, Status
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view, authentication_classes, permission_classes, throttle_classes
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import IsAuthenticated
from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView, exception_handler
from rest_framework.viewsets import ModelViewSet, ViewSet

from django_sqlsem import semaphore

if TYPE_CHECKING:
    from django.http import HttpRequest

place = semaphore("place", slots=1, timeout=0)
per_user = semaphore("user:{request.user.pk}", timeout=0)


class ByHeader(BaseAuthentication):
    """The user whose number is in ``X-User``; bad words fail."""

    def authenticate(self, request):
        number = request.headers.get("X-User")
        if number == "bad":
            raise AuthenticationFailed
        return (User(pk=int(number), username=f"user{number}"), None) if number else None

    def authenticate_header(self, request):
        return "X-User"


class Never(BaseThrottle):
    def allow_request(self, request, view):
        return "refuse" not in request.GET

    def wait(self):
        return 33


def own_handler(error, context):
    response = exception_handler(error, context)
    if response is not None:
        response.data = {"problem": getattr(error, "default_code", ""), "view": type(context["view"]).__name__}
        del response.headers["Retry-After"]
    return response


def silent_handler(error, context):
    return None


@api_view(["GET"])
@authentication_classes([ByHeader])
@permission_classes([IsAuthenticated])
@throttle_classes([Never])
@per_user
def function(request):
    return Response({"user": request.user.pk})


class Rest(APIView):
    authentication_classes = [ByHeader]
    renderer_classes = [JSONRenderer, BrowsableAPIRenderer]


class Handler(Rest):
    @place
    def get(self, request):
        return Response({})


@method_decorator(place, name="dispatch")
class Dispatched(Rest):
    def get(self, request):
        return Response({})


@method_decorator(per_user, name="dispatch")
class DispatchedPerUser(Rest):
    def get(self, request):
        return Response({})


class OwnHandler(Handler):
    def get_exception_handler(self):
        return own_handler


class SilentHandler(Handler):
    def get_exception_handler(self):
        return silent_handler


class Rows(ViewSet):
    renderer_classes = [JSONRenderer, BrowsableAPIRenderer]

    @place
    def list(self, request):
        return Response([])

    @action(detail=False, methods=["get"])
    @place
    def extra(self, request):
        return Response([])


class Models(ModelViewSet):
    queryset = User.objects.none()
    renderer_classes = [JSONRenderer, BrowsableAPIRenderer]

    @place
    def list(self, request, *args, **kwargs):
        return super().list(request, *args, **kwargs)


router = DefaultRouter()
router.register("rows", Rows, basename="rows")

api = NinjaAPI(urls_namespace="frameworks")


class In(Schema):
    number: int


class Out(Schema):
    number: int


@api.post("/typed", response=Out)
@place
def typed(request: HttpRequest, payload: In) -> Any:
    return {"number": payload.number + 1}


@api.get("/sync", response=Out)
@place
def ninja_sync(request, number: int = 1):
    return {"number": number}


@api.get("/own", response={200: Out, 503: dict[str, int]})
@semaphore("place", timeout=0, on_busy=lambda about: Status(503, {"wait": about.retry_after}))
def ninja_own(request):
    return {"number": 1}


async_api = NinjaAPI(urls_namespace="frameworks_async")


@async_api.get("/async", response=Out)
@place
async def ninja_async(request, number: int = 1):
    return {"number": number}


def of_on_busy(on_busy):
    @semaphore("place", timeout=0, on_busy=on_busy)
    def view(request):
        raise AssertionError("not while it is busy")

    return view


async def later(about):
    return JsonResponse({})


def fails(about):
    raise ZeroDivisionError("of on_busy")


urlpatterns = [
    path("function", function),
    path("handler", Handler.as_view()),
    path("dispatched", Dispatched.as_view()),
    path("dispatched-per-user", DispatchedPerUser.as_view()),
    path("around", place(Rest.as_view())),
    path("around-set", place(Rows.as_view({"get": "list"}))),
    path("own-handler", OwnHandler.as_view()),
    path("silent-handler", SilentHandler.as_view()),
    path("models", Models.as_view({"get": "list"})),
    path("router/", include(router.urls)),
    path("ninja/", api.urls),
    path("ninja-async/", async_api.urls),
    path("nothing", of_on_busy(lambda about: None)),
    path("words", of_on_busy(lambda about: "busy")),
    path("later", of_on_busy(later)),
    path("fails", of_on_busy(fails)),
    path("request", of_on_busy(lambda about: JsonResponse({"path": about.request.path}, status=503))),
]
