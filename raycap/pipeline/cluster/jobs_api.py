"""Ray's jobs server, called with Ray's own client: a deadline for every request, and one sentence for each refusal.

The token is taken from where Ray looks for it: RAY_AUTH_TOKEN, the file named by RAY_AUTH_TOKEN_PATH, or
~/.ray/auth_token; RAY_AUTH_MODE=disabled sends none.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import threading
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import expanded_path, one_line, shown

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

REQUEST_S, UPLOAD_S = 30.0, 600.0  # deadlines of requests
SILENCE_S = 20.0  # after this long without output of a job, the server is checked
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray's client prefers them to its argument
CLIENT_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")

logger = logging.getLogger(__name__)


class UnreachableError(OSError):
    """The server could not be reached, or failed in a way that may be temporary."""


class AbsentError(UserError):
    """The server does not have what was asked for."""


class JobsServer:
    """The jobs server at a dashboard's address, such as http://head:8265."""

    def __init__(self, address: str) -> None:
        self.address = _checked_address(address)
        self.token, self.token_from = find_token()
        self.headers: dict[str, str] = {}  # the token is sent only to a server that asks for one

    @cached_property
    def ray_version(self) -> str:
        """The head's version of Ray. UserError when the server refuses the token."""
        import requests

        url = f"{self.address}/api/version"
        try:
            answer = requests.get(url, timeout=REQUEST_S)
            if answer.status_code == 401 and self.token:
                if not _is_private(self.address):
                    logger.warning("the token is sent over http, where others can read it; use https or a tunnel")
                self.headers = {"Authorization": f"Bearer {self.token}"}
                answer = requests.get(url, headers=self.headers, timeout=REQUEST_S)
        except requests.RequestException as error:
            raise UnreachableError(f"{self.address} cannot be reached: {one_line(error)}") from error
        if answer.status_code != 200:
            raise self._refusal(answer.status_code, answer.text)
        try:
            return str(answer.json()["ray_version"])
        except (ValueError, KeyError, TypeError):
            raise self._refusal(404, "") from None

    def submit(self, job_id: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> None:
        """Uploads the working directory of `runtime_env` and starts a job under an id chosen here."""
        arguments = {"entrypoint": entrypoint, "runtime_env": runtime_env, "metadata": metadata}
        try:
            self._call("submit_job", UPLOAD_S, submission_id=job_id, **arguments)
        except UnreachableError as error:
            try:
                self.job(job_id)  # the job was started and only the answer was lost
            except (UserError, UnreachableError):
                raise error from None

    def job(self, job_id: str) -> JobDetails:
        """A job's record: status, message, driver_exit_code. Raises UserError when there is no such job."""
        details: JobDetails = self._about("get_job_info", job_id)
        return details

    def logs(self, job_id: str) -> str:
        """The output of a job so far."""
        return str(self._about("get_job_logs", job_id))

    def stop(self, job_id: str) -> None:
        """Requests that a job end."""
        self._about("stop_job", job_id)

    async def tail(self, job_id: str) -> AsyncIterator[str]:
        """A job's log from its beginning, piece by piece, until the job ends. Raises UnreachableError when it is cut.

        A connection that has died says nothing. So an empty piece follows each SILENCE_S without output, and the caller
        then checks the server by another request.
        """
        import aiohttp

        pieces = self._client.tail_job_logs(job_id)
        try:
            while True:
                piece = asyncio.ensure_future(anext(pieces, None))
                try:
                    while not (await asyncio.wait({piece}, timeout=SILENCE_S))[0]:
                        yield ""
                finally:
                    piece.cancel()
                text = piece.result()
                if text is None:
                    return
                yield text
        except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
            raise UnreachableError(f"{self.address}: the connection was cut ({one_line(error)})") from error

    @cached_property
    def _client(self) -> JobSubmissionClient:
        version = self.ray_version  # raises an error in one sentence, and finds out whether a token is needed
        from ray.job_submission import JobSubmissionClient

        logger.debug(f"{self.address} has Ray {version}")
        for name in CLIENT_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        with _without(ADDRESS_VARIABLES):
            # without any authorization, Ray adds the token even for a server that does not ask for it
            return JobSubmissionClient(self.address, headers=self.headers or {"Authorization": ""})

    def _about(self, method: str, job_id: str) -> Any:
        """The result of a method for one job. The id becomes a part of a URL."""
        try:
            if re.fullmatch(r"[\w-]+", job_id, re.ASCII):
                return self._call(method, REQUEST_S, job_id)
        except AbsentError:
            pass
        raise UserError(f"{self.address} has no job {shown(job_id)}; look up its id in the cluster's dashboard")

    def _call(self, method: str, deadline_s: float, *arguments: Any, **named: Any) -> Any:
        """The result of a method of Ray's client, which sets no deadlines. So it runs in a thread of its own."""
        import requests
        from ray.exceptions import AuthenticationError

        future = Future[Any]()

        def run() -> None:
            try:
                future.set_result(getattr(self._client, method)(*arguments, **named))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="jobs-server", daemon=True).start()
        try:
            return future.result(deadline_s)
        except TimeoutError:
            raise UnreachableError(f"{self.address} has not answered within {deadline_s:g} s") from None
        except AuthenticationError as error:
            raise self._refusal(403 if self.token else 401, str(error)) from None
        except (requests.RequestException, ConnectionError) as error:
            raise UnreachableError(f"{self.address} cannot be reached: {one_line(error)}") from error
        except RuntimeError as error:  # the client's error for other answers
            found = re.search(r"status code (\d+): (.*)", str(error), re.DOTALL)
            if found is None:
                raise
            raise self._refusal(int(found[1]), found[2]) from None
        except (TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.address} gives an answer that this Ray cannot read: {one_line(error)}") from error

    def _refusal(self, code: int, text: str) -> Exception:
        """The error to raise for an HTTP status code and the text of the server's answer."""
        last_line = text.strip().splitlines()[-1] if text.strip() else f"status {code}"
        refusals = {
            401: "asks for a token and none was sent; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to the file that "
            "holds it",
            403: f"refuses the token from {self.token_from}; use the token that its head was started with",
        }
        if code == 404:
            return AbsentError(f"{self.address} is not a Ray dashboard; give the head's dashboard address")
        if 400 <= code < 500:
            return UserError(f"{self.address} {refusals.get(code, f'refuses the request: {last_line}')}")
        return UnreachableError(f"{self.address} failed with status {code}: {last_line}")


def _checked_address(address: str) -> str:
    """The address with its scheme and without a slash at its end. Raises UserError for a text that is none."""
    if "://" not in address:
        address = f"http://{address}"
    try:
        parts = urllib.parse.urlsplit(address)
        is_valid = parts.port != 0 and parts.scheme in ("http", "https") and parts.hostname and address.isprintable()
    except ValueError:  # a port or host that cannot be
        is_valid = False
    if is_valid and (parts.username or parts.password):
        raise UserError("--address contains a user or password; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file")
    if is_valid:
        return address.rstrip("/")
    raise UserError(
        f"--address {shown(address)} is not a dashboard's address; give the address that Ray's head prints, "
        "for example http://head:8265"
    )


def _is_private(address: str) -> bool:
    """Whether nobody else can read what is sent to an address: over https, or to this machine."""
    parts = urllib.parse.urlsplit(address)
    host = parts.hostname or ""
    with suppress(ValueError):
        return parts.scheme == "https" or ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextmanager
def _without(variables: tuple[str, ...]) -> Iterator[None]:
    """Takes environment variables away in the context."""
    values: Mapping[str, str] = {name: os.environ.pop(name) for name in variables if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


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
