"""Consumers of Channels that hold permits. A message ``x`` sets the mark ``in-x`` and waits for ``go-x``."""

from __future__ import annotations

import asyncio
from typing import Any

import django
from channels.generic.http import AsyncHttpConsumer
from channels.generic.websocket import AsyncWebsocketConsumer, WebsocketConsumer
from channels.routing import ProtocolTypeRouter, URLRouter
from django.core.asgi import get_asgi_application
from django.urls import path, re_path

from django_sqlsem import AcquireTimeoutError, Permit, semaphore
from django_sqlsem.busy import Busy
from tests.places.async_views import until
from tests.places.marks import Marks

LOCK = semaphore("channels", timeout=60)
LIFE = semaphore("life", timeout=60)


class Block(AsyncWebsocketConsumer):
    """Holds while it works at a message."""

    async def receive(self, text_data: str = "", bytes_data: bytes | None = None) -> None:
        async with LOCK:
            Marks().set(f"in-{text_data}")
            await until(f"go-{text_data}")
        await self.send(f"done {text_data}")


class Decorated(AsyncWebsocketConsumer):
    """The same by decorators; what is told apart is a field of the consumer."""

    async def connect(self) -> None:
        self.room = self.scope["url_route"]["kwargs"]["room"]
        await self.accept()

    @semaphore("room:{self.room}", timeout=60)
    async def receive(self, text_data: str = "", bytes_data: bytes | None = None) -> None:
        Marks().set(f"in-{text_data}")
        await until(f"go-{text_data}")
        await self.send(f"done {text_data}")


def later(busy: Busy) -> str:
    """What a busy method returns instead."""
    return f"busy {busy.retry_after}"


class Busily(AsyncWebsocketConsumer):
    """Says what comes of a busy call."""

    async def receive(self, text_data: str = "", bytes_data: bytes | None = None) -> None:
        work = {"skip": self.skipped, "callable": self.called, "omitted": self.raised, "key": self.keyed}[text_data]
        try:
            await self.send(f"{await work()}")
        except AcquireTimeoutError as error:
            await self.send(f"raised {error.name}")

    @semaphore("channels", timeout=0, on_busy="skip")
    async def skipped(self) -> str:
        return "ran"

    @semaphore("channels", timeout=0, on_busy=later)
    async def called(self) -> str:
        return "ran"

    @semaphore("channels", timeout=0)
    async def raised(self) -> str:
        return "ran"

    @semaphore("channels", timeout=0, key=lambda self: self.scope["path"].strip("/"))
    async def keyed(self) -> str:
        return "ran"


class Life(AsyncWebsocketConsumer):
    """Holds as long as its visitor is there, and waits in a task of its own: then it sees who leaves meanwhile."""

    work: asyncio.Task[None]

    async def connect(self) -> None:
        await self.accept()
        self.work = asyncio.create_task(self.stay())

    async def stay(self) -> None:
        async with LIFE:
            await self.send("yours")
            await asyncio.Event().wait()

    async def disconnect(self, code: int) -> None:
        self.work.cancel()
        await asyncio.wait([self.work])


class Naive(AsyncWebsocketConsumer):
    """Waits in a handler: until that has ended, Channels calls no other."""

    permit: Permit | None = None

    async def connect(self) -> None:
        await self.accept()
        self.permit = await semaphore("life", timeout=3).aacquire()
        await self.send("yours")

    async def disconnect(self, code: int) -> None:
        if self.permit is not None:
            await self.permit.arelease()


class Synchronous(WebsocketConsumer):
    """Takes what is free, and holds it as long as its visitor is there."""

    permit: Permit | None = None

    def connect(self) -> None:
        self.accept()
        self.permit = LIFE.try_acquire()
        self.send("yours" if self.permit else "busy")

    def disconnect(self, code: int) -> None:
        if self.permit is not None:
            self.permit.release()


class Page(AsyncHttpConsumer):
    """An answer in pieces."""

    @semaphore("page", timeout=60)
    async def handle(self, body: bytes) -> None:
        one = self.scope["query_string"].decode()
        await self.send_headers(headers=[(b"Content-Type", b"text/plain")])
        await self.send_body(b"first\n", more_body=True)
        Marks().set(f"in-{one}")
        await until(f"go-{one}")
        await self.send_body(b"next\n")


def application() -> Any:
    """Return the routes."""
    django.setup()
    sockets = [
        path("block", Block.as_asgi()),
        path("room/<room>", Decorated.as_asgi()),
        path("busily", Busily.as_asgi()),
        path("life", Life.as_asgi()),
        path("naive", Naive.as_asgi()),
        path("synchronous", Synchronous.as_asgi()),
    ]
    pages = [path("page", Page.as_asgi()), re_path("", get_asgi_application())]
    return ProtocolTypeRouter({"http": URLRouter(pages), "websocket": URLRouter(sockets)})
