"""A jobs server in a thread, in place of a cluster's."""

from __future__ import annotations

import asyncio
import importlib.metadata
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.support.ray_cluster import free_port

JOB = {"type": "SUBMISSION", "entrypoint": "x"}
LINES = [f"line {number}\n" for number in range(40)]


class Stub:
    """A jobs server with one job: its log is cut in the middle of each of the first connections."""

    def __init__(self) -> None:
        self.status, self.exit_code, self.cuts = "RUNNING", 0, 2
        self.pending = 1  # answers before the job is running
        self.submitted: list[dict[str, Any]] = []
        self.received: list[tuple[str, str | None, bytes]] = []  # request, token, body
        self.endless = self.is_forgetful = False
        self.address = ""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**25, middlewares=[self.note])
        app.router.add_get("/api/jobs/{id}/logs/tail", self.tail)
        app.router.add_get("/api/jobs/{id}", self.job)
        app.router.add_post("/api/jobs/", self.submit)
        app.router.add_get("/api/version", self.version)
        app.router.add_get("/api/packages/gcs/{name}", self.package)
        app.router.add_put("/api/packages/gcs/{name}", self.package)
        return app

    @web.middleware
    async def note(self, request: web.Request, handler: Any) -> Any:
        token = request.headers.get("Authorization")
        self.received.append((f"{request.method} {request.path}", token, await request.read()))
        return await handler(request)

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"ray_version": importlib.metadata.version("ray")})

    async def package(self, request: web.Request) -> web.Response:
        return web.Response(status=404 if request.method == "GET" else 200)

    async def submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.submitted.append(body)
        return web.json_response({"job_id": "01000000", "submission_id": body["submission_id"]})

    async def job(self, request: web.Request) -> web.Response:
        if self.is_forgetful:
            return web.Response(status=404, text="Job job-1 does not exist")
        if self.pending > 0:
            self.pending -= 1
            return web.json_response(JOB | {"status": "PENDING", "message": "waiting for a node"})
        body = {"status": self.status, "driver_exit_code": self.exit_code, "message": "why it failed"}
        return web.json_response(JOB | body)

    async def tail(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for start in range(0, len(LINES), 4):
            await socket.send_str("".join(LINES[start : start + 4]))
            if self.cuts and start == 16:
                self.cuts -= 1
                request.transport.abort()  # type: ignore[union-attr]
                return socket
        if self.status == "RUNNING" and not self.endless:
            self.status = "SUCCEEDED" if self.exit_code == 0 else "FAILED"
        await socket.close()
        return socket


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    server, started, loop = Stub(), threading.Event(), asyncio.new_event_loop()

    async def start() -> None:
        runner = web.AppRunner(server.application())
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.address = f"http://127.0.0.1:{port}"
        started.set()

    def serve() -> None:
        loop.create_task(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(20)
    monkeypatch.setattr("raycap.jobs.submit.POLL_S", 0.05)
    yield server
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
