"""What `raycap submit` sends: the code and nothing else, the right command, no secret; and what it refuses before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.jobs.submit import parse_arguments
from raycap.pipeline.cluster.packaging import package_sources, stage
from raycap.pipeline.cluster.submission import (
    check_data_file,
    check_local_paths,
    check_options,
    check_texts,
    entrypoint,
    named_files,
    package_files,
    requirements,
    runtime_env,
    secret_names,
    variables,
)
from raycap.pipeline.config.load import load_config
from raycap.pipeline.config.shipped import named_data
from raycap.pipeline.errors import UserError
from raycap.pipeline.version import commit
from tests.conftest import ROOT, small_config

SECRET = "marked-credential-7f3a"
REMOTE = ["--model", "s3://b/models/m"]
PACKAGE = ROOT / "raycap"
S3 = ["--set", "storage=s3://b/prefix"]


GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
CODE = ("jobs/cli.py", "pipeline/reports/page.html", "models/base.py", "configs/data/a.yaml", "__main__.py")
PACKED = {f"raycap/{name}" for name in CODE}


def checkout(root: Path) -> Path:
    """A small project with everything that must stay where it is, and links as in a checkout. Returns the package."""
    others = (
        *("tests/test_a.py", "docs/a.md", "pyproject.toml", "raycap_onnx/a.py", "raycap/models/key.pem"),
        *("results/model.safetensors", "heat-maps/1.png", "notes.txt", ".env", "raycap/jobs/__pycache__/a.pyc"),
    )
    for name in (*sorted(PACKED), *others):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for name in ("jobs", "pipeline", "models", "configs"):
        (root / name).symlink_to(Path("raycap") / name)
    return root / "raycap"


def track(package: Path) -> None:
    for words in (["init", "--quiet"], ["add", "--force", "."]):
        subprocess.run([*GIT, *words], cwd=package.parent, check=True)


def test_only_the_package_is_packed(tmp_path: Path) -> None:
    package = checkout(tmp_path / "project")
    outside = tmp_path / "outside.py"
    outside.write_text(SECRET)
    (package / "link.py").symlink_to(outside)
    track(package)
    assert set(package_sources(package)) == PACKED


def test_a_checkout_without_git_and_links_is_packed(tmp_path: Path) -> None:
    """A downloaded archive of the project has no .git, and on some systems no links."""
    package = checkout(tmp_path / "project")
    for name in ("jobs", "pipeline", "models", "configs"):
        (package.parent / name).unlink()
    assert set(package_sources(package)) == PACKED


def test_a_checkout_sends_what_git_tracks_and_names_modules_that_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = checkout(tmp_path / "project")
    root = package.parent
    track(package)
    package_sources(package)
    assert not caplog.records
    (root / ".gitignore").write_text("ignored.py\n")
    for name in ("models/new.py", "models/ignored.py", "configs/mine.yaml"):
        (package / name).write_text("x = 1\n")
    (package / "jobs" / "cli.py").unlink()
    assert set(package_sources(package)) == PACKED - {"raycap/jobs/cli.py"}
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "git does not track raycap/models/new.py, which the job lacks; git add what it needs"


@pytest.mark.parametrize("fault", ["owner", "no git", "dangling"])
def test_a_checkout_whose_files_git_cannot_list_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Files that git may not track are not sent in its place."""
    package = checkout(tmp_path / "project")
    track(package)
    match fault:
        case "owner":
            monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        case "no git":
            monkeypatch.setenv("PATH", str(tmp_path))
        case _:
            shutil.rmtree(package.parent / ".git")
            (package.parent / ".git").write_text("gitdir: /nowhere\n")
    with pytest.raises(UserError, match="git cannot list the files of .*project, which decides what is sent: "):
        package_sources(package)


def test_an_installed_package_in_the_repository_of_another_project_is_packed(tmp_path: Path) -> None:
    package = tmp_path / "project" / "raycap"
    for name in (*CODE, "../models/theirs.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    track(package)
    assert set(package_sources(package)) == PACKED


def test_a_package_of_links_is_packed_and_an_incomplete_one_refused(tmp_path: Path) -> None:
    """Some installers link files from their cache."""
    package = tmp_path / "site-packages" / "raycap"
    for name in CODE:
        source = tmp_path / "cache" / name
        for place in (source, package / name):
            place.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(name)
        (package / name).symlink_to(source)
    assert set(package_sources(package)) == PACKED
    (package / "__main__.py").unlink()
    with pytest.raises(UserError, match=r"raycap has no file __main__\.py to send"):
        package_sources(package)


def test_files_above_the_limit_are_refused_with_the_largest(tmp_path: Path) -> None:
    files: dict[str, Path | bytes] = {"small.py": b"x", "noise.bin": bytes(300_000), "deep/other.bin": bytes(200_000)}
    with pytest.raises(UserError, match=r"where all nodes find them.*noise\.bin \(0\.3 MiB\), deep/other\.bin "):
        stage(files, tmp_path, limit=250_000)
    assert not list(tmp_path.iterdir())
    assert stage(files, tmp_path, limit=600_000).startswith("3 files, 0.5 MiB; the largest: noise.bin ")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"small.py", "noise.bin", "other.bin"}


def test_a_job_runs_in_its_folder_and_finds_its_configuration(tmp_path: Path) -> None:
    """The folder holds what a job imports, no tests, and the commit that git would say."""
    files, config = package_files(ROOT / "raycap" / "configs" / "search_demo.yaml", PACKAGE)
    stage(files, tmp_path, limit=5 * 2**20)
    assert config == "raycap/configs/search_demo.yaml" and [path.name for path in tmp_path.iterdir()] == ["raycap"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import raycap.jobs.cli as cli; print(cli.__file__); cli.main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "raycap" / "jobs" / "cli.py") in done.stdout
    assert f"commit  {commit()}" in done.stdout


def test_a_configuration_from_elsewhere_travels_with_its_base(tmp_path: Path) -> None:
    base = tmp_path / "shared" / "base.yaml"
    base.parent.mkdir()
    base.write_text(yaml.safe_dump(small_config("/shared/storage")))
    search = tmp_path / "mine" / "search.yaml"
    search.parent.mkdir()
    search.write_text("name: s\nbase: ../shared/base.yaml\n")
    files, path = package_files(search, PACKAGE)
    assert path == "submitted/mine/search.yaml" and files["submitted/shared/base.yaml"] == base
    files, path = package_files(ROOT / "raycap" / "configs" / "search_demo.yaml", PACKAGE)
    packed = {
        f"raycap/configs/{name}" for name in ("recipes/search_demo.yaml", "demo.yaml", "recipes/four_stages.yaml")
    }
    assert packed <= files.keys()
    assert path == "raycap/configs/search_demo.yaml" and not any(name.startswith("submitted") for name in files)


def test_relative_files_that_are_named_travel_to_the_folder_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    for name in ("words/a.txt", "b.json"):
        (tmp_path / name).write_text("a")
    (tmp_path.parent / "outside.txt").write_text("a")
    named = ["./words/a.txt", Path("b.json"), "../outside.txt", "words", "absent.txt", "x" * 5000, "a\0b"]
    files, _ = package_files(None, PACKAGE, [*named, tmp_path / "b.json"])
    assert {name for name in files if not name.startswith("raycap/")} == {"words/a.txt", "b.json"}
    assert files["words/a.txt"] == Path("words/a.txt")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small_config({"uri": "s3://bucket/prefix"})))
    config = load_config(path, ["data.extra_vocabulary=words/a.txt", "evaluation.constraints=b.json"])
    assert named_files(config) == {"data.extra_vocabulary": "words/a.txt", "evaluation.constraints": "b.json"}
    assert check_local_paths(config, files) == []


@pytest.mark.parametrize("form", ["lines", "json"])
def test_a_file_with_a_private_key_is_refused(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "-----BEGIN " + "RSA PRIVATE KEY-----" + "\nMIIEvQIBADANBgkqhkiG9w0B\n"
    Path("words.txt").write_text(text if form == "lines" else json.dumps({"key": text}))
    with pytest.raises(UserError, match=r"^words.txt contains a private key"):
        package_files(None, PACKAGE, ["words.txt"])


def test_a_configuration_from_elsewhere_travels_with_what_it_extends(tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "small.yaml"
    recipe.parent.mkdir()
    recipe.write_text(yaml.safe_dump(small_config("/shared/storage")) + "init_from: ${BUNDLE}\n")
    config = tmp_path / "run.yaml"
    config.write_text("extends: recipes/small.yaml\nname: mine\n")
    files, path = package_files(config, PACKAGE)
    assert path == "submitted/run.yaml" and files["submitted/recipes/small.yaml"] == recipe
    with pytest.raises(UserError, match=r"small.yaml needs the environment variable BUNDLE on the cluster"):
        check_texts(config, [], [])


def test_the_entry_point_is_the_same_command_and_names_missing_secrets() -> None:
    command = entrypoint("run", ["configs/a b.yaml", "--set", "name=x y"], ["S3_KEY"])
    assert command.endswith("exec python -m raycap run 'configs/a b.yaml' --set 'name=x y'")
    assert "S3_KEY:?is not set on the cluster" in command
    environment = runtime_env(Path("code"), {"A": "1"}, ["six==1.17.0"])
    waits = {"RAY_JOB_STOP_WAIT_TIME_S": "90"}
    assert environment["env_vars"] == {"A": "1"} | waits and environment["pip"]["packages"] == ["six==1.17.0"]
    assert runtime_env(Path("code"), {}, []) == {"working_dir": "code", "env_vars": waits}
    (own,) = runtime_env(Path("code"), {name: "5" for name in waits}, [])["env_vars"].values()
    assert own == "5"


def test_the_entry_point_stops_without_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYCAP_TEST_KEY", raising=False)
    entry = entrypoint("run", ["c.yaml"], secrets=["RAYCAP_TEST_KEY"]).replace("exec python", "echo would run")
    done = subprocess.run(["sh", "-c", entry], capture_output=True, text=True)
    assert done.returncode != 0 and "RAYCAP_TEST_KEY" in done.stderr and "not set on the cluster" in done.stderr
    monkeypatch.setenv("RAYCAP_TEST_KEY", "x")
    assert subprocess.run(["sh", "-c", entry], capture_output=True, text=True).stdout.startswith("would run")


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


@pytest.mark.parametrize(
    "given",
    [
        *(
            "GITHUB_PAT=x",
            "MYSQL_PWD=x",
            "AZURE_STORAGE_KEY=x",
            "PASSPHRASE=x",
            "DB_PWD=x",
            "SIGNING_KEY=x",
            "SECRETS=x",
        ),
        *(
            "TOKENS=x",
            "ORIGIN=https://ghp_x@host",
            "ORIGIN=https://h/?password=longer-word",
            "ORIGIN=https://h/a?b=c&token=longer-word",
        ),
        *("DB=postgresql://u:a/b@host", "DB=postgresql://u:a b@host", "STORE=AccountName=a;access_key=longer-word"),
    ],
)
def test_variables_that_look_like_secrets_are_refused(given: str) -> None:
    with pytest.raises(UserError, match="looks like a secret"):
        variables([given])


@pytest.mark.parametrize(
    "override",
    [
        *("tracking.uri=https://TOKEN@h", "tracking.uri=postgresql://u:a/b@h", "tracking.uri=postgresql://u:a b@h"),
        *("tracking.uri=https://h/?token=longer-word", "tracking={uri: 'https://u:${PW}x@h'}"),
    ],
)
def test_overrides_and_files_that_hold_secrets_are_refused(override: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("name: a\n")
    with pytest.raises(UserError, match=r"an argument contains a password or token.*write it as \$\{NAME\}"):
        check_texts(config, ["--set", override], ["PW"])
    if not override.startswith("tracking="):
        config.write_text(yaml.safe_dump({"name": "a", "set": dict([override.split("=", 1)])}))
        with pytest.raises(UserError, match="run.yaml contains a password or token"):
            check_texts(config, [], [])
    check_texts(tmp_path / "run.yaml", [], []) if override.startswith("tracking=") else None
    check_texts(None, ["--set", "tracking.uri=https://u:${PW}@h"], ["PW"])


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
        ([], f"name: a  # was https://me:{SECRET}@host\n"),
        ([], f"a: {{password: {SECRET}}}\n"),
        ([f"--set=a=https://me:{SECRET} with a blank@host"], "name: a\n"),
    ):
        config.write_text(text)
        with pytest.raises(UserError, match="contains a password") as refused:
            check_texts(config, arguments, [])
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("comment", "is_secret"),
    [
        ("start with: export MLFLOW_TRACKING_PASSWORD=... and raycap run", False),
        ("export HF_TOKEN=hf_... first", False),
        ("HF_TOKEN=$TOKEN raycap run", False),
        ("HF_TOKEN=${TOKEN} raycap run", False),
        ("HF_TOKEN=$(cat token) raycap run", False),
        ("postgresql://USER:PASSWORD@HOST/db", False),
        ("password = <your password>", False),
        ("password=<your password> and more", False),
        ("try --set model.key=x", False),
        ("order by key=length", False),
        (f"HF_TOKEN={SECRET}", True),
        (f"HF_TOKEN=${{TOKEN}}{SECRET}", True),
        (f"https://h/?api_key={SECRET}", True),
        (f"api_key={SECRET}", True),
        (f"key=https://u:{SECRET}@h", True),
        (f"postgresql://USER:{SECRET}@HOST/db", True),
        ("-----BEGIN PRIVATE KEY-----", True),
    ],
)
def test_comments_may_hold_placeholders_and_no_secrets(comment: str, is_secret: bool, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    for text in (f"name: a\n# {comment}\n", f"seed: 1\nname: a  # {comment}\n"):
        config.write_text(text)
        if not is_secret:
            check_texts(config, [], [])
            continue
        with pytest.raises(UserError, match="line 2, contains a password.*; remove it from the comment$") as refused:
            check_texts(config, [], [])
        assert SECRET not in str(refused.value)


def test_paths_of_this_machine(tmp_path: Path) -> None:
    def parsed(**changes: str) -> list[str]:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(small_config("results")))
        return check_local_paths(load_config(path, [f"{key}={value}" for key, value in changes.items()]))

    with pytest.raises(UserError, match="storage = results"):
        parsed()
    assert parsed(storage="s3://bucket/prefix", init_from="s3://bucket/models/a") == []
    with pytest.raises(UserError, match="init_from = results/models/a"):
        parsed(storage="s3://bucket/prefix", init_from="results/models/a")
    (warning,) = parsed(storage="/shared/results")
    assert "every node" in warning


def test_options_that_name_files_of_this_machine() -> None:
    packed = {"configs/words.json"}
    check_options(
        {"out": "s3://bucket/out", "models": ["/shared/model", "s3://bucket/model"], "compared": None}, packed
    )
    check_options({"constraints": Path("configs/words.json")}, packed)
    for values, option in (
        ({"out": "out"}, "--out out"),
        ({"models": ["results/models/a"]}, "--model results/models/a"),
        ({"compared": ["s3://bucket/a", "b"]}, "--compare b"),
        ({"features": "c"}, "--features c"),
        ({"data": Path("e.yaml")}, "--data e.yaml"),
        ({"constraints": Path("d.json")}, "--constraints d.json"),
        ({"json_file": Path("configs/words.json")}, "--json configs/words.json"),
    ):
        with pytest.raises(UserError, match=f"^{option} is relative to a job's folder"):
            check_options(values, packed)


def test_a_data_file_is_brought_or_every_node_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shipped one that git does not track is refused: the job would lack it."""
    package = checkout(tmp_path / "project")
    data = package / "configs" / "data"
    (data / "a.yaml").write_text("data: {}")
    track(package)
    (data / "mine.yaml").write_text("extends: a.yaml")
    (data / "based.yaml").write_text("extends: mine.yaml")
    subprocess.run([*GIT, "add", "raycap/configs/data/based.yaml"], cwd=package.parent, check=True)
    for module in ("cluster.submission", "config.shipped"):
        monkeypatch.setattr(f"raycap.pipeline.{module}.package_folder", lambda: package)
    files, _ = package_files(None, package)
    named = {name: named_data(Path(name)) for name in ("a", "mine", "based")}
    assert check_data_file(cast(Path, named["a"]), files) == [] == check_data_file(Path("mine.yaml"), files)
    for name in ("mine", "based"):
        with pytest.raises(UserError, match=rf"^--data {name}: the job lacks .*/mine.yaml, which git does not track; "):
            check_data_file(cast(Path, named[name]), files)


def test_a_data_file_elsewhere_must_be_on_every_node(tmp_path: Path, log_lines: list[str]) -> None:
    data = tmp_path / "data.yaml"
    data.write_text("data: {root: s3://b/set, annotations: a.json}")
    words = ["submit", "evaluate", str(ROOT / "raycap" / "configs" / "demo.yaml"), *S3, "--data", str(data)]
    assert main([*words, "--address", "http://127.0.0.1:9"]) != 0, "nobody answers there"
    assert f"--data {data}: every node of the cluster must have the same file" in log_lines


FILE_KEYS: dict[str, dict[str, str]] = {  # with the other keys that they need
    "backbone.weights": {},
    "features.hdf5": {f"stages.{name}.train_backbone": "false" for name in ("xe_finetune", "scst_finetune")},
    "model.word_vectors": {"model.word_vector_width": "50"},
    "data.extra_vocabulary": {},
    "evaluation.constraints": {},
}


@pytest.mark.parametrize("key", FILE_KEYS)
def test_files_of_this_machine(key: str, tmp_path: Path) -> None:
    def warnings(value: str, *packed: str) -> list[str]:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(small_config({"uri": "s3://bucket/prefix"})))
        changes = [f"{name}={value}" for name, value in ({key: value} | FILE_KEYS[key]).items()]
        return check_local_paths(load_config(path, changes), packed)

    for file in ("words/a.txt", "s3://bucket/a.txt"):
        with pytest.raises(UserError) as refused:
            warnings(file)
        assert str(refused.value) == (
            f"{key} = {file} is no file of a job's nodes; give the absolute path of a file that all nodes have "
            "(in the image, or in a shared folder)"
        )
    assert warnings("/shared/a.txt") == [f"{key} = /shared/a.txt: every node of the cluster must have the same file"]
    assert warnings("./words/a.txt", "words/a.txt") == [], "it is sent with the code"
    for value in {"backbone.weights": ("none", "pretrained"), "features.hdf5": ("synthetic",)}.get(key, ()):
        assert warnings(value) == []


def test_the_command_line_is_checked_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ROOT / "raycap" / "configs" / "demo.yaml"
    values = parse_arguments("run", [str(config), "--set", "seed=1", "--set", "name=x"])
    assert values["set_"] == ["seed=1", "name=x"] and values["config"] == config
    assert not parse_arguments("evaluate", [str(config), "--split", "test"])["set_"]
    with pytest.raises(UserError, match="cannot be submitted; one of .*caption.*run.*tune"):
        parse_arguments("score", [str(config)])
    with pytest.raises(UserError, match="refuses these options: .*--splt"):
        parse_arguments("evaluate", [str(config), "--splt", "test"])
    nobody, nocaps, local = (
        "http://127.0.0.1:9",
        ROOT / "raycap" / "configs" / "data" / "nocaps_val.yaml",
        tmp_path / "data.yaml",
    )
    local.write_text("data: {root: images}")
    for words, named in (
        (["run", str(config), "--set", "seeed=1"], "unknown key seeed"),
        (["run", str(config)], "storage = results"),
        (["run", str(tmp_path / "no.yaml")], "does not exist"),
        (["run", "--set", "a=1", str(config)], "the form is"),
        (["stop", "some-job", "--set", "a=1"], "the form is"),
        (["run", str(config), "--secret", "A=1"], "leave it out"),
        (["run", str(config), *S3, "--set", "backbone.weights=s3://b/w"], "backbone.weights = s3://b/w is no file of"),
        (["evaluate", str(config), *S3, "--data", str(nocaps)], "needs the environment variable RAYCAP_NOCAPS"),
        (["evaluate", str(config), *S3, "--data", str(local)], "data.root = images is relative to a job's folder"),
        (["caption", "photos/", *REMOTE], "IMAGES photos/ is on this machine"),
        (["caption", "s3://b/*.jpg", "--model", "results/m"], "--model results/m is on this machine"),
        (["caption", "s3://b/*.jpg", *REMOTE, "--out", "x.jsonl"], "--out x.jsonl is on this machine"),
        (["caption", "s3://b/*.jpg", *REMOTE, "--explain", "maps"], "--explain maps is on this machine"),
        (["caption", "s3://b/*.jpg", *REMOTE, "--beem", "3"], "refuses these options: No such option: --beem"),
        (["caption", "s3://${BUCKET}/*.jpg", *REMOTE], "an argument needs the environment variable BUCKET"),
    ):
        assert main(["submit", *words, "--address", nobody]) == 2
        message = capsys.readouterr().err.strip()
        assert named in message and "\n" not in message
    assert main(["submit", "status", "x", "--address", "ray://head:10001"]) == 2
    assert "dashboard's address" in capsys.readouterr().err


def test_dependencies_are_the_lock_without_ray(tmp_path: Path) -> None:
    from ray.runtime_env import RuntimeEnv

    lines = requirements(ROOT)
    assert any(line.startswith("torch==") for line in lines) and not any(line.startswith("ray==") for line in lines)
    RuntimeEnv(**runtime_env(tmp_path, {}, lines))
    with pytest.raises(UserError, match="checkout"):
        requirements(tmp_path)
