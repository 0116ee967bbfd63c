"""`raycap submit` against a jobs server: a stub that cuts connections, and a Ray cluster of this test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.job_submission import JobSubmissionClient

from raycap.jobs.cli import main
from raycap.jobs.submit import follow
from raycap.pipeline.errors import JobFailedError
from tests.conftest import ROOT, small_config
from tests.support.jobs_server import LINES, Stub
from tests.support.logs import on_message
from tests.support.ray_cluster import Cluster, free_port, ray_cluster

TOKEN = "sesame-0123456789abcdef"


def followed(stub: Stub, said: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with on_message(said.append):
        code = follow(JobSubmissionClient(stub.address), "job-1")
    return code, capsys.readouterr().out


@pytest.mark.parametrize(("exit_code", "expected"), [(0, 0), (2, 2), (17, 17), (-9, 137)])
def test_a_log_cut_twice_is_printed_once_and_the_exit_code_is_the_jobs(
    stub: Stub, capsys: pytest.CaptureFixture[str], exit_code: int, expected: int
) -> None:
    stub.exit_code, said = exit_code, list[str]()
    code, text = followed(stub, said, capsys)
    printed = [line for line in text.splitlines(keepends=True) if line in LINES]  # the log may share the stream
    assert printed == list(LINES), "every line once, in order"
    assert code == expected and stub.cuts == 0
    assert sum("trying again" in line for line in said) == 2 and any("waiting for a node" in line for line in said)


def test_a_stopped_job_and_one_that_never_started_are_failures(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.cuts, stub.status = 0, "STOPPED"
    assert followed(stub, [], capsys)[0] == 1
    said: list[str] = []
    stub.status, stub.exit_code = "FAILED", None  # type: ignore[assignment]
    assert followed(stub, said, capsys)[0] == 1 and "why it failed" in said[-1]


def test_a_cluster_out_of_reach_for_too_long_is_given_up(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycap.jobs.submit.GIVE_UP_AFTER_S", 0.2)
    client = JobSubmissionClient(stub.address)
    client._address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(JobFailedError, match="the job job-1 may still run"):
        follow(client, "job-1")


def test_a_job_that_a_restarted_head_has_forgotten_ends_at_once(stub: Stub) -> None:
    stub.is_forgetful = True
    with pytest.raises(JobFailedError, match="does not have the job job-1 any more"):
        follow(JobSubmissionClient(stub.address), "job-1")


def test_a_submission_names_the_command_and_the_configuration(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")  # Ray's client would prefer it
    stub.cuts, config = 0, tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config("/shared/results")))
    words = ["submit", "run", str(config), "--address", stub.address, "--set", "seed=5", "--env", "NCCL_DEBUG=INFO"]
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would send  {config}\nwould send  the package raycap\n" and not stub.submitted
    assert main(words) == 0
    out = capsys.readouterr().out
    (job,) = stub.submitted
    assert job["entrypoint"] == "exec python -m raycap run submitted/run.yaml --set seed=5"
    assert job["runtime_env"]["env_vars"] == {"NCCL_DEBUG": "INFO", "RAY_JOB_STOP_WAIT_TIME_S": "90"}
    assert "line 39" in out and "succeeded" in out and f"ray job stop {job['submission_id']}" in out
    assert main([*words[:3], "--address", f"127.0.0.1:{free_port()}"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def raycap(cluster: Cluster, *words: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, without a terminal."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    environment |= {"RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "raycap", "submit", *words, "--address", cluster.dashboard]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=570)


@pytest.mark.proof
@pytest.mark.ray
def test_a_job_on_a_cluster_with_a_token(tmp_path: Path) -> None:
    """Without the token and with a wrong one, the command says a sentence and exits with 2.

    With it, the command prints the job's log and has the job's exit code."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_config(tmp_path / "storage")))
    with ray_cluster(TOKEN) as cluster:
        for token in (None, "another-0123456789"):
            refused = raycap(cluster, "check", str(config), token=token)
            assert refused.returncode == 2 and "refuses the token" in refused.stderr, refused.stderr
            assert len(refused.stderr.strip().splitlines()) == 1 and "another-" not in refused.stderr
        done = raycap(cluster, "check", str(config), token=TOKEN)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "fit to train on" in done.stdout and "succeeded" in done.stdout and TOKEN not in done.stdout
        failed = raycap(cluster, "check", str(config), "--secret", "RAYCAP_NOT_THERE", token=TOKEN)
        assert failed.returncode not in (0, 1) and "RAYCAP_NOT_THERE" in failed.stdout
