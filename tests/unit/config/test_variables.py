"""`${VARIABLE}`: its value is used, and what is stored, sent or said contains the reference."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml

from raycap.jobs.cli import main
from raycap.pipeline.config.load import dump_config, load_config, parse_stored_config
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.runs.identity import config_identity
from raycap.pipeline.runtime.secrets import forget_all, without_secrets
from raycap.pipeline.search.spec import load_search
from tests.conftest import small_config

VALUES = {
    "T_STORE": "/marked/storage-1",
    "T_EXPERIMENT": "marked-experiment-2",
    "T_SPLIT": "val",
    "T_SEED": "7",
    "T_TRACKER": "http://me:marked/pass word@host:1",
    "T_PW": "pw-word-5",
    "T_SHORT": "qz",
}


def write_config(folder: Path) -> Path:
    settings = small_config("${T_STORE}/results")
    settings["seed"] = "${T_SEED}"
    settings["data"]["val_split"] = "${T_SPLIT}"
    settings["tracking"] = {"uri": "${T_TRACKER}", "experiment": "a ${T_EXPERIMENT}"}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)
    return write_config(tmp_path)


def expect(config: RunConfig) -> None:
    assert config.storage.uri == "/marked/storage-1/results" and config.seed == 7 and config.data.val_split == "val"
    assert config.tracking.experiment == "a marked-experiment-2"


def test_the_values_are_used_and_the_references_stored(path: Path) -> None:
    config = load_config(path)
    expect(config)
    text = dump_config(config)
    assert "marked" not in text
    stored = yaml.safe_load(text)
    assert stored["storage"]["uri"] == "${T_STORE}/results" and stored["data"]["val_split"] == "${T_SPLIT}"
    assert stored["tracking"] == {"enabled": True, "experiment": "a ${T_EXPERIMENT}"}
    assert stored["seed"] == 7, "a number is no secret, and a run's record needs it"
    stored_again = parse_stored_config(stored, config.variables)
    expect(stored_again)
    assert dump_config(stored_again) == text
    assert dump_config(pickle.loads(pickle.dumps(config))) == text  # noqa: S301 - it was written here


def test_references_do_not_change_the_identity(path: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    values = yaml.safe_load(path.read_text())
    values |= {"seed": 7, "storage": "elsewhere", "data": values["data"] | {"val_split": "val"}, "tracking": {}}
    plain.write_text(yaml.safe_dump(values))
    assert config_identity(load_config(path)) == config_identity(load_config(plain))


def test_a_search_keeps_the_references(path: Path, tmp_path: Path) -> None:
    search = tmp_path / "search.yaml"
    search.write_text(
        "name: s\nbase: run.yaml\nstorage: '${T_STORE}/s'\nspace: {model.d_model: [16]}\nalgorithm: grid\n"
    )
    sent = pickle.dumps(load_search(search).without_tracker())
    assert b"pass word" not in sent
    received = pickle.loads(sent)  # noqa: S301 - it was written here
    config = received.trial_config(received.space.first(), seed=0)
    assert config.storage.uri == "/marked/storage-1/s"
    assert yaml.safe_load(dump_config(config))["storage"]["uri"] == "${T_STORE}/s"


def test_a_process_without_the_variables_receives_them_with_the_runs_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.dumps(RunFolder(tmp_path / "run", load_config(path)))
    assert b"pass word" not in sent, "a worker needs no tracker"
    for name in VALUES:
        monkeypatch.delenv(name)
    forget_all()
    config = pickle.loads(sent).config  # noqa: S301 - it was written here
    assert config.storage.uri == "/marked/storage-1/results" and config.data.val_split == "val"
    assert without_secrets(config.storage.uri) == "${T_STORE}/results"


def test_a_stored_configuration_gets_the_variables_of_the_users_file_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes to a storage could otherwise read any variable in what a command sends or says."""
    config = load_config(path)
    values = yaml.safe_load(dump_config(config))
    values["tracking"]["experiment"] = "${T_EXPERIMENT} ${T_OTHER}"
    values["storage"]["endpoint_url"] = "http://host/${T_OTHER}"
    monkeypatch.setenv("T_OTHER", "marked-other")
    stored = parse_stored_config(values, config.variables)
    assert stored.storage.uri == config.storage.uri
    assert stored.tracking.experiment == "${T_EXPERIMENT} ${T_OTHER}"
    assert stored.storage.endpoint_url == "http://host/${T_OTHER}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tracking=${T_TRACKER}", "tracking = '${T_TRACKER}'"),
        ("tracking=postgresql://u:marked word@h", "--set tracking contains a password or token"),
        ("tracking.uri=http://me:marked@h", "write it as ${NAME}"),
        ("tracking={uri: {password: marked}}", "--set tracking contains a password or token"),
        ("storage.secret_access_key=marked", "--set storage.secret_access_key contains a password or token"),
        ("seed=${T_PW}", "seed = '${T_PW}'"),
        ("seed=${T_SHORT}", "seed = '${T_SHORT}'"),
        ("data={synthetic: {}, tokenizer: '${T_PW}'}", "data.tokenizer = '${T_PW}'"),
        ("name=${T_STORE}", "name '${T_STORE}' must be letters"),
        ("name=${T_PW}?", "name '${T_PW}?' must be letters"),
    ],
)
def test_messages_show_references_and_no_passwords(
    path: Path, override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(path), "--set", override]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert not [value for name, value in VALUES.items() if name not in ("T_SEED", "T_SPLIT") and value in message]
    assert "marked" not in message
