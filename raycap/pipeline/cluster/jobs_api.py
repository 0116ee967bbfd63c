"""Ray's jobs server over HTTP: a deadline for every request, and one sentence per refusal.

This uses the documented REST interface (/api/version, /api/packages, /api/jobs) because Ray's JobSubmissionClient sets
no timeouts, sends its token to every server, and reads it once per process. The token is taken from where Ray looks for
it: RAY_AUTH_TOKEN, the file named by RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token; RAY_AUTH_MODE=disabled sends none.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import ipaddress
import json
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import expanded_path, shown

REQUEST_S, UPLOAD_S = 30.0, 600.0  # deadlines of requests
SUBMIT_ATTEMPTS = 3
MAX_NODES = 10_000  # the largest number that Ray lists (RAY_MAX_LIMIT_FROM_API_SERVER)
SILENCE_S = 20.0  # after this long without output of a job, the server is checked
FINAL_STATES = ("SUCCEEDED", "FAILED", "STOPPED")


logger = logging.getLogger(__name__)


class UnreachableError(OSError):
    """The server could not be reached, or failed in a way that may be temporary."""


class _OwnRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects within one server, or to the same host's https. Others would hand over the request's token."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        is_upgrade = old.hostname == new.hostname and (old.scheme, new.scheme) == ("http", "https")
        if not is_upgrade and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            raise UserError(
                f"{old.scheme}://{old.netloc} redirects to {new.scheme}://{new.netloc}, which would receive the token; "
                "if this is the dashboard, give its address"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class JobsServer:
    """The jobs server at a dashboard's address, such as http://head:8265."""

    def __init__(self, address: str) -> None:
        if "://" not in address:
            address = f"http://{address}"
        if not _is_address(address):
            raise UserError(
                f"--address {shown(address)} is not a dashboard's address; give the address that Ray's head prints, "
                "for example http://head:8265"
            )
        parts = urllib.parse.urlsplit(address)
        if parts.username or parts.password:
            raise UserError(
                "--address contains a user or password; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file"
            )
        self.address = address.rstrip("/")
        is_local = _is_this_machine(str(parts.hostname))
        self.is_unencrypted = parts.scheme == "http" and not is_local
        self.token, self.token_from = find_token()
        self.token_sent = False
        self._trusts_proxies = not is_local  # a proxy is not asked for this machine's own servers
        direct = [urllib.request.ProxyHandler({})] if is_local else []
        self._opener = urllib.request.build_opener(_OwnRedirects, *direct)
        self.headers: dict[str, str] = {}  # the token is sent only to a server that asks for one

    def version(self) -> dict[str, Any]:
        """The head's versions, among them `ray_version`. UserError when the server refuses the token."""
        versions: dict[str, Any] = self._request("GET", "/api/version")
        if "ray_version" not in versions:
            raise UserError(f"{self.address} answers, but is not a Ray dashboard; give the head's dashboard address")
        return versions

    def nodes(self) -> list[dict[str, Any]]:
        """The cluster's nodes, each with the entries `state` and `resources_total`."""
        answer = self._request("GET", f"/api/v0/nodes?detail=1&limit={MAX_NODES}")
        return list(answer.get("data", {}).get("result", {}).get("result", []))

    def upload(self, name: str, archive: Path) -> bool:
        """Uploads a package to the cluster. Returns False, without an upload, when the cluster has it already."""
        path = f"/api/packages/gcs/{name}"
        try:
            self._request("GET", path)
            return False
        except FileNotFoundError:
            self._request("PUT", path, archive.read_bytes(), UPLOAD_S)
            return True

    def submit(self, job_id: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> None:
        """Starts a job under an id chosen here, so that a request repeated after a cut connection starts only one."""
        body = {"submission_id": job_id, "entrypoint": entrypoint, "runtime_env": runtime_env, "metadata": metadata}
        for attempt in range(1, SUBMIT_ATTEMPTS + 1):
            try:
                self._request("POST", "/api/jobs/", json.dumps(body).encode(), UPLOAD_S)
                return
            except UnreachableError:
                with suppress(UserError, UnreachableError):
                    self.job(job_id)
                    return  # the job was started and only the answer was lost
                if attempt == SUBMIT_ATTEMPTS:
                    raise

    def job(self, job_id: str) -> dict[str, Any]:
        """A job's record: status, message, driver_exit_code. Raises UserError when there is no such job."""
        try:
            return dict(self._request("GET", _job_path(job_id)))
        except FileNotFoundError:
            raise UserError(f"{self.address} has no job {job_id}; look up its id in the cluster's dashboard") from None

    def logs(self, job_id: str) -> str:
        """The output of a job so far."""
        return str(self._request("GET", f"{_job_path(job_id)}/logs").get("logs", ""))

    def stop(self, job_id: str) -> bool:
        """Requests that a job end. Returns False when it had ended already."""
        return bool(self._request("POST", f"{_job_path(job_id)}/stop", b"").get("stopped"))

    async def tail(self, job_id: str) -> AsyncIterator[str]:
        """A job's log from its beginning, piece by piece, until the job ends. Raises UnreachableError when it is cut.

        Ray's server answers no ping. So an empty piece follows each SILENCE_S without output, and the caller then
        checks the server by another request.
        """
        import aiohttp

        url = f"{self.address}{_job_path(job_id)}/logs/tail"
        timeout = aiohttp.ClientTimeout(total=None, connect=REQUEST_S, sock_connect=REQUEST_S)
        try:
            async with (
                aiohttp.ClientSession(headers=self.headers, timeout=timeout, trust_env=self._trusts_proxies) as session,
                session.ws_connect(url, max_msg_size=0) as socket,
            ):
                async for piece in _pieces(socket):
                    yield piece
                if socket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE or socket.exception() is not None:
                    raise UnreachableError(f"{self.address}: the connection was cut")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnreachableError(f"{self.address}: {error or type(error).__name__}") from error

    def _request(self, method: str, path: str, body: bytes | None = None, deadline_s: float = REQUEST_S) -> Any:
        """Sends a request. Returns the JSON of the answer; {} if the answer is not JSON.

        Raises FileNotFoundError for status 404, UserError for a refusal, and UnreachableError for other failures.
        """
        headers = self.headers | ({"Content-Type": "application/json"} if path == "/api/jobs/" else {})
        request = urllib.request.Request(self.address + path, data=body, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=deadline_s) as response:
                data = response.read()
        except urllib.error.HTTPError as error:
            if error.code == 401 and self.token and not self.token_sent:
                if self.is_unencrypted:
                    logger.warning("the token is sent over http, where others can read it; use https or a tunnel")
                self.token_sent, self.headers = True, {"Authorization": f"Bearer {self.token}"}
                return self._request(method, path, body, deadline_s)
            raise self._refusal(error.code, error.read().decode("utf-8", "replace")) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            raise UnreachableError(f"{self.address} cannot be reached: {reason}") from error
        with suppress(ValueError):
            return json.loads(data)
        return {}

    def _refusal(self, code: int, text: str) -> Exception:
        """The error to raise for an HTTP status code and the text of the server's answer."""
        last_line = text.strip().splitlines()[-1] if text.strip() else f"status {code}"
        if code == 404:
            return FileNotFoundError(errno.ENOENT, last_line, self.address)
        refusals = {
            400: f"refuses the request: {last_line}",
            401: "asks for a token and none was sent; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to the file that "
            "holds it",
            403: f"refuses the token from {self.token_from}; use the token that its head was started with",
            413: f"refuses the request: {last_line}",
        }
        if code in refusals:
            return UserError(f"{self.address} {refusals[code]}")
        return UnreachableError(f"{self.address} failed with status {code}: {last_line}")


def _is_address(address: str) -> bool:
    """Whether a text is an address of HTTP with which urllib can try to connect."""
    try:
        parts = urllib.parse.urlsplit(address)
        host, _ = (parts.hostname or "").encode("idna"), parts.port  # an error for a label or port that cannot be
    except ValueError:
        return False
    is_plain = address.isprintable() and f"{parts.path}{parts.query}".isascii()
    return parts.scheme in ("http", "https") and bool(host) and is_plain


def _is_this_machine(host: str) -> bool:
    """Whether a host's name or IP address can only mean this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _job_path(job_id: str) -> str:
    return f"/api/jobs/{urllib.parse.quote(job_id, safe='')}"


async def _pieces(socket: Any) -> AsyncIterator[str]:
    """Yields the texts that a WebSocket receives until it is closed, and "" after each SILENCE_S without a text."""
    while True:
        received = asyncio.ensure_future(socket.receive())
        try:
            while not received.done():
                await asyncio.wait({received}, timeout=SILENCE_S)
                if not received.done():
                    yield ""
        finally:
            received.cancel()
        text = received.result().data
        if not isinstance(text, str):  # the connection was closed or cut, or has failed
            return
        yield text


def find_token() -> tuple[str | None, str]:
    """The token (None without one) and the name of its source. The sources are tried in Ray's order.

    Raises UserError for a token that cannot be sent, which is not part of the message.
    """
    token, source = _read_token()
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(f"the token from {source} must be one line of printable ASCII characters without blanks")
    return token, source


def _read_token() -> tuple[str | None, str]:
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None, "nowhere (RAY_AUTH_MODE is not token)"
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = expanded_path(given) if given else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None, str(path)
    except OSError as error:
        if not given:
            return None, "nowhere"
        message = f"RAY_AUTH_TOKEN_PATH = {given} cannot be read: {error.strerror}; name the token's file"
        raise UserError(message) from error
