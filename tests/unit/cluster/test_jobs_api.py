"""The address that a user gives is the one that is asked, and the token reaches no server that asks for none."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.cluster.jobs_api import JobsServer, UnreachableError
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.secrets import forget_all, without_secrets

TOKEN = "marked-token-8c1d"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    forget_all()


def test_the_token_is_sent_to_a_server_that_asks(
    answers: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = {"ray_version": "2.60.0"}
    answers["/api/version"] = (200, version)
    assert JobsServer(answers["address"]).ray_version == "2.60.0" and answers.pop("tokens") == [None]
    answers["/api/version"] = (200, version | {"token": f"Bearer {TOKEN}"})
    assert JobsServer(answers["address"]).ray_version == "2.60.0"
    assert answers.pop("tokens") == [None, f"Bearer {TOKEN}"] and not caplog.records
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(UserError, match="refuses the token from RAY_AUTH_TOKEN"):
        _ = JobsServer(answers["address"]).ray_version


def test_the_address_wins_over_the_environment(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's client would ask the server of RAY_ADDRESS."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    answers["/api/version"] = (200, {"ray_version": "2.60.0"})
    answers["/api/jobs/a/logs"] = (200, {"logs": "text"})
    assert JobsServer(answers["address"]).logs("a") == "text"
    for job_id in ("b", "../version", "a/logs?"):
        with pytest.raises(UserError, match="has no job"):
            JobsServer(answers["address"]).logs(job_id)


def test_a_server_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycap.pipeline.cluster.jobs_api.REQUEST_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UnreachableError):
        JobsServer(f"http://127.0.0.1:{silent.getsockname()[1]}").logs("a")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://me:word@head:8265", "contains a user or password"),
        ("http://ghp_x@head:8265", "contains a user or password"),
        *((text, "is not a dashboard's address") for text in ("ftp://h", "http://", "http://[::1", "http://h:abc")),
        ("http://h:1/\r\nX: y", "is not a dashboard's address"),
    ],
)
def test_a_text_that_is_no_address_is_refused(address: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        JobsServer(address)
    assert str(refused.value).isprintable() and "word" not in str(refused.value).replace("password", "")


def test_a_token_that_cannot_be_sent_is_refused_without_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bad in ("marked\ntoken", "marked token", "marked-t\u00f6ken"):
        monkeypatch.setenv("RAY_AUTH_TOKEN", bad)
        with pytest.raises(UserError, match="the token from RAY_AUTH_TOKEN must be one line") as refused:
            JobsServer("http://127.0.0.1:9")
        assert "marked" not in str(refused.value)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "token").write_bytes(b"marked\xff")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(UserError, match="the token from .*/token must be one line"):
        JobsServer("http://127.0.0.1:9")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "marked-token")  # the token in place of its file
    with pytest.raises(UserError, match="RAY_AUTH_TOKEN_PATH = .* cannot be read") as refused:
        JobsServer("http://127.0.0.1:9")
    assert "marked" not in without_secrets(str(refused.value))
