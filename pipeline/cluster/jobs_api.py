"""Ray's jobs server over HTTP: a deadline on every request, and each refusal as one sentence.

The documented REST interface (/api/version, /api/packages, /api/jobs) in place of Ray's client, which waits without
end for a server that does not answer. A token comes from where Ray takes it: RAY_AUTH_TOKEN, the file that
RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token; RAY_AUTH_MODE=disabled sends none.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pipeline.cluster.packaging import Package
from pipeline.errors import UserError

REQUEST_S, UPLOAD_S = 30.0, 600.0
SILENCE_S = 20.0  # how long a log may be silent before the server is asked whether it lives
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


class UnreachableError(OSError):
    """The server could not be reached, or failed in a way that may pass."""


class JobsServer:
    """The jobs server at a dashboard's address, such as http://head:8265."""

    def __init__(self, address: str) -> None:
        if "://" not in address:
            address = f"http://{address}"
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"--address {address} is not a dashboard's address; give the one that Ray's head shows, "
                "for example http://head:8265"
            )
        if parts.password:
            raise UserError("--address holds a password; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file")
        self.address = address.rstrip("/")
        self.is_open = (
            parts.scheme == "http"
            and parts.hostname not in ("localhost", "::1")
            and not parts.hostname.startswith("127.")
        )
        self.token, self.token_from = find_token()
        self.token_sent = False  # only to a server that asks for one

    def version(self) -> dict[str, Any]:
        """Ray's version on the head, among others. UserError without a token that it takes."""
        found: dict[str, Any] = self._request("GET", "/api/version")
        if "ray_version" not in found:
            raise UserError(f"{self.address} answers, but is not a Ray dashboard; give the head's dashboard address")
        return found

    def nodes(self) -> list[dict[str, Any]]:
        """The cluster's nodes, each with state and resources_total."""
        answer = self._request("GET", "/api/v0/nodes?detail=1&limit=1000")
        found: list[dict[str, Any]] = answer.get("data", {}).get("result", {}).get("result", [])
        return found

    def send(self, package: Package) -> bool:
        """Brings a package to the cluster; False when it was there already."""
        path = f"/api/packages/gcs/{package.name}"
        try:
            self._request("GET", path)
            return False
        except FileNotFoundError:
            self._request("PUT", path, package.path.read_bytes(), UPLOAD_S)
            return True

    def submit(self, job_id: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> None:
        """Starts a job under an id of ours: a request that is repeated after a cut connection starts it once."""
        body = {"submission_id": job_id, "entrypoint": entrypoint, "runtime_env": runtime_env, "metadata": metadata}
        for attempt in range(3):
            try:
                self._request("POST", "/api/jobs/", json.dumps(body).encode(), UPLOAD_S)
                return
            except UnreachableError:
                if self._is_there(job_id):
                    return
                if attempt == 2:
                    raise

    def job(self, job_id: str) -> dict[str, Any]:
        """What the server knows of a job: status, message, driver_exit_code. UserError when there is none."""
        try:
            found: dict[str, Any] = self._request("GET", f"/api/jobs/{urllib.parse.quote(job_id, safe='')}")
            return found
        except FileNotFoundError:
            raise UserError(
                f"{self.address} knows no job {job_id}; look its id up in the cluster's dashboard"
            ) from None

    def logs(self, job_id: str) -> str:
        """All that a job has printed so far."""
        return str(self._request("GET", f"/api/jobs/{urllib.parse.quote(job_id, safe='')}/logs").get("logs", ""))

    def stop(self, job_id: str) -> bool:
        """Asks a job to end; False when it was over already."""
        return bool(self._request("POST", f"/api/jobs/{urllib.parse.quote(job_id, safe='')}/stop", b"").get("stopped"))

    async def tail(self, job_id: str) -> AsyncIterator[str]:
        """A job's log from its beginning, piece by piece, until the job is over. UnreachableError when it is cut.

        An empty piece after each SILENCE_S without one: Ray's server answers no ping, so the caller asks otherwise
        whether it lives.
        """
        import aiohttp

        url = f"{self.address}/api/jobs/{urllib.parse.quote(job_id, safe='')}/logs/tail"
        timeout = aiohttp.ClientTimeout(total=None, connect=REQUEST_S, sock_connect=REQUEST_S)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=True) as session,
                session.ws_connect(url, max_msg_size=0) as socket,
            ):
                async for text in _pieces(socket):
                    yield text
                if socket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE or socket.exception() is not None:
                    raise UnreachableError(f"{self.address}: the connection was cut")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnreachableError(f"{self.address}: {error or type(error).__name__}") from error

    def _is_there(self, job_id: str) -> bool:
        try:
            self.job(job_id)
        except (UserError, UnreachableError):
            return False
        return True

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token_sent else {}

    def _request(self, method: str, path: str, body: bytes | None = None, deadline_s: float = REQUEST_S) -> Any:
        """The answer's JSON, or {}. FileNotFoundError for 404, UserError for refusals, else UnreachableError."""
        headers = self._headers | ({"Content-Type": "application/json"} if path == "/api/jobs/" else {})
        request = urllib.request.Request(self.address + path, data=body, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=deadline_s) as response:
                data = response.read()
        except urllib.error.HTTPError as error:
            if error.code == 401 and self.token and not self.token_sent:
                self.token_sent = True
                return self._request(method, path, body, deadline_s)
            raise self._refusal(error.code, error.read().decode("utf-8", "replace")) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            raise UnreachableError(f"{self.address} cannot be reached: {reason}") from error
        try:
            return json.loads(data) if data else {}
        except ValueError:
            return {}

    def _refusal(self, code: int, text: str) -> Exception:
        last = text.strip().splitlines()[-1] if text.strip() else f"status {code}"
        if code == 401:
            return UserError(
                f"{self.address} asks for a token and none was sent; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to the "
                "file that holds it"
            )
        if code == 403:
            return UserError(
                f"{self.address} refuses the token from {self.token_from}; take the one that its head was started with"
            )
        if code == 404:
            return FileNotFoundError(2, last, self.address)
        if code in (400, 413):
            return UserError(f"{self.address} refuses the request: {last}")
        return UnreachableError(f"{self.address} failed with status {code}: {last}")


async def _pieces(socket: Any) -> AsyncIterator[str]:
    """A WebSocket's texts, and "" after each silence, until it is closed."""
    while True:
        waiting = asyncio.ensure_future(socket.receive())
        try:
            while not (await asyncio.wait({waiting}, timeout=SILENCE_S))[0]:
                yield ""
        finally:
            waiting.cancel()
        message = waiting.result()
        if not isinstance(message.data, str):  # closed, cut, or an error
            return
        yield message.data


def find_token() -> tuple[str | None, str]:
    """A token and where it was found, where Ray looks for it; it is never printed."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None, "nowhere (RAY_AUTH_MODE is not token)"
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        if named:
            raise UserError(
                f"RAY_AUTH_TOKEN_PATH = {named} cannot be read: {error.strerror}; name the token's file"
            ) from error
        return None, "nowhere"
    return token or None, str(path)
