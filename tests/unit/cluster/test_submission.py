"""What `raycap submit` sends: the code and nothing else, the right command, no secret; and what it refuses before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.jobs.submit import (
    check_paths,
    check_texts,
    dashboard_address,
    entrypoint,
    job_files,
    named_paths,
    pack,
    parse_arguments,
    secret_names,
    variables,
)
from raycap.pipeline.config.load import load_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.version import commit
from tests.conftest import ROOT, small_config

SECRET = "marked-credential-7f3a"
REMOTE = ["--model", "s3://b/models/m"]
S3 = ["--set", "storage=s3://b/prefix"]
CONFIGS = ROOT / "raycap" / "configs"


def test_a_job_runs_in_its_folder_and_finds_its_configuration(tmp_path: Path) -> None:
    """The folder has what a job imports and the commit, but no bytecode and no tests."""
    files, config = job_files(CONFIGS / "search_demo.yaml", [])
    pack(tmp_path, files)
    assert config == "raycap/configs/search_demo.yaml" and [path.name for path in tmp_path.iterdir()] == ["raycap"]
    assert not list(tmp_path.rglob("*.pyc")) and sum(path.stat().st_size for path in tmp_path.rglob("*")) < 5 * 2**20
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import raycap.jobs.cli as cli; print(cli.__file__); cli.main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "raycap" / "jobs" / "cli.py") in done.stdout
    assert f"commit  {commit()}" in done.stdout


def test_a_configuration_from_elsewhere_travels_with_what_it_names(tmp_path: Path) -> None:
    base = tmp_path / "shared" / "base.yaml"
    base.parent.mkdir()
    base.write_text(yaml.safe_dump(small_config("/shared/storage")) + "init_from: ${BUNDLE}\n")
    search = tmp_path / "mine" / "search.yaml"
    search.parent.mkdir()
    search.write_text("name: s\nbase: ../shared/base.yaml\n")
    files, path = job_files(search, [])
    assert path == "submitted/mine/search.yaml" and files["submitted/shared/base.yaml"] == base
    with pytest.raises(UserError, match=r"base.yaml needs the environment variable BUNDLE on the cluster"):
        check_texts(search, [], [])


def test_relative_files_that_are_named_travel_to_the_folder_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    for name in ("words/a.txt", "b.json"):
        (tmp_path / name).write_text("a")
    (tmp_path.parent / "outside.txt").write_text("a")
    named = ["./words/a.txt", Path("b.json"), "../outside.txt", "words", "absent.txt", "x" * 5000, "a\0b"]
    files, _ = job_files(None, [*named, tmp_path / "b.json"])
    assert files.keys() == {"words/a.txt", "b.json"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_config({"uri": "s3://bucket/prefix"})))
    config = load_config(path, ["data.extra_vocabulary=words/a.txt", "evaluation.constraints=b.json"])
    check_paths(named_paths(config).items(), files)


@pytest.mark.parametrize("name", [".env", ".aws/credentials", "link.txt", "near.txt", "words.txt"])
def test_a_named_file_with_secrets_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".aws").mkdir()
    for file, text in ((".env", "a"), (".aws/credentials", "a"), ("words.txt", f"token={SECRET}")):
        (tmp_path / file).write_text(text)
    (tmp_path / "link.txt").symlink_to(ROOT / "README.md")
    (tmp_path / "near.txt").symlink_to(".env")
    with pytest.raises(UserError, match=name) as refused:
        job_files(None, [name])
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("is_set", [False, True])
def test_the_entry_point_is_the_same_command_and_stops_without_its_secret(
    monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    command = entrypoint("run", ["configs/a b.yaml", "--set", "name=x y"], ["RAYCAP_TEST_KEY"])
    assert command.endswith("exec python -m raycap run 'configs/a b.yaml' --set 'name=x y'")
    monkeypatch.setenv("RAYCAP_TEST_KEY", "x")
    if not is_set:
        monkeypatch.delenv("RAYCAP_TEST_KEY")
    shell = ["sh", "-c", command.replace("exec python", "echo would run")]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.stdout.startswith("would run") is is_set is (done.returncode == 0)
    assert ("RAYCAP_TEST_KEY: is not set on the cluster" in done.stderr) is not is_set


def test_secrets_go_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert variables(["NCCL_DEBUG", "OMP_NUM_THREADS=2"]) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    assert variables(["TOKENIZERS_PARALLELISM=0"]), "not every name with TOKEN in it is a token's"
    for given in ("MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY=x", "HF_TOKEN=x", "DB=postgresql://me:pw@host/db"):
        with pytest.raises(UserError, match="--secret") as refused:
            variables([given])
        assert SECRET not in str(refused.value) and "pw" not in str(refused.value)
    with pytest.raises(UserError, match="not set here"):
        variables(["RAYCAP_NOT_THERE"])
    assert secret_names(["A_TOKEN", "A_TOKEN"]) == ("A_TOKEN",)
    with pytest.raises(UserError, match="leave it out") as refused:
        secret_names([f"A_TOKEN={SECRET}"])
    assert SECRET not in str(refused.value)


def test_texts_that_travel_hold_no_password_and_name_every_variable(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("name: a  # ${COMMENT}\ntracking: {uri: 'https://u:${MLFLOW_PASSWORD}@host'}\n")
    with pytest.raises(UserError, match="MLFLOW_PASSWORD on the cluster"):
        check_texts(config, [], [])
    check_texts(config, [], ["MLFLOW_PASSWORD"])
    with pytest.raises(UserError, match="an argument needs the environment variable BUCKET"):
        check_texts(config, ["--set", "storage=s3://${BUCKET}"], ["MLFLOW_PASSWORD"])
    for arguments, text in (
        ([], f"uri: https://me:{SECRET}@host\n"),
        ([f"--set=a=https://me:{SECRET}@host"], "name: a\n"),
        (["--set", f"tracking.uri=https://h/?token={SECRET}"], "name: a\n"),
        ([], f"a: {{password: {SECRET}}}\n"),
        ([f"--set=a=https://me:{SECRET} with a blank@host"], "name: a\n"),
    ):
        config.write_text(text)
        with pytest.raises(UserError, match="contains a password") as refused:
            check_texts(config, arguments, [])
        assert SECRET not in str(refused.value)


def test_paths_of_this_machine() -> None:
    packed = {"words/a.txt"}
    for path in ("none", "synthetic", "s3://bucket/prefix", "./words/a.txt", "/shared"):
        check_paths([("key", path)], packed)
    for path in ("results", Path("words/b.txt")):
        with pytest.raises(UserError, match=f"^--out = {path} is relative to a job's folder"):
            check_paths([("--out", path)], packed)


@pytest.mark.parametrize("address", ["http://me:word@head:8265", "ftp://h", "ray://head:10001", "h:1/\r"])
def test_what_is_no_address_of_a_dashboard_is_refused(address: str) -> None:
    assert dashboard_address("head:8265/") == "http://head:8265"
    with pytest.raises(UserError, match="is not a dashboard's address"):
        dashboard_address(address)


def test_the_command_line_is_checked_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIGS / "demo.yaml"
    values = parse_arguments("run", [str(config), "--set", "seed=1", "--set", "name=x"])
    assert values["set_"] == ["seed=1", "name=x"] and values["config"] == config
    nocaps = CONFIGS / "data" / "nocaps_val.yaml"
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").touch()  # the job would not get the output of an earlier call
    for words, named in (
        (["caption", "s3://b/*.jpg", *REMOTE, "--out", "there.jsonl"], "--out = there.jsonl"),
        (["score", str(config)], "cannot be submitted"),
        (["evaluate", str(config), "--splt", "test"], "--splt"),
        (["run", str(config), "--set", "seeed=1"], "seeed"),
        (["run", str(config)], "storage = results"),
        (["run", "--set", "a=1", str(config)], "the form is"),
        (["evaluate", str(config), *S3, "--data", str(nocaps)], "RAYCAP_NOCAPS"),
        (["evaluate", str(config), *S3, "--model", "results/models/a"], "--model = results/models/a"),
        (["caption", "photos/", *REMOTE], "IMAGES = photos/"),
        (["caption", "s3://${BUCKET}/*.jpg", *REMOTE], "BUCKET"),
    ):
        assert main(["submit", *words, "--address", "http://127.0.0.1:9"]) == 2, words
        message = capsys.readouterr().err.strip()
        assert named in message and "\n" not in message
