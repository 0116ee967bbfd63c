"""Secrets are recognized in addresses, by names, and where an error quotes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from raycap.pipeline.runtime.secrets import (
    MIN_SECRET,
    forget_all,
    holds_secret,
    is_secret_name,
    remember_address,
    remember_variable,
    split_userinfo,
    without_secrets,
)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    forget_all()
    yield
    forget_all()


@given(st.text("abcXYZ019 %:?#&=+;,$!'\"\\()é-", min_size=MIN_SECRET, max_size=24).filter(lambda text: text.strip()))
def test_a_password_of_the_configuration_is_removed_in_each_form(password: str) -> None:
    address = f"postgresql://user:{password}@host:5432/db?sslmode=require"
    assert split_userinfo(address) == (f"user:{password}", "postgresql://host:5432/db?sslmode=require")
    assert make_url(address).username == "user", "SQLAlchemy reads the same"
    assert holds_secret(address)
    remember_address(address)
    for form in (password, quote(password, safe=""), repr(password)[1:-1]):
        assert form not in without_secrets(f"request to {address} failed; the password was '{form}'")
    forget_all()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:a/b@c@host/db 's3://b/c:d/e@2x'", "postgresql://host/db 's3://b/c:d/e@2x'"),
        ("https://h/?key=AIza-long;AccountKey=abcd==", "https://h/?key=***;AccountKey=***"),
        ("keyboard=mechanical tokens_per_word=2", "keyboard=mechanical tokens_per_word=2"),
        ("see http://u:pw@host:5000/api and sqlite:////a@b/c.db", "see http://host:5000/api and sqlite:////a@b/c.db"),
        ("'https://ghp_token@host/x' refused", "'https://host/x' refused"),
        ("http://127.0.0.1:9000/bucket/photo@2x.png", "http://127.0.0.1:9000/bucket/photo@2x.png"),
        ("http://h:80 is down; mail a@b", "http://h:80 is down; mail a@b"),
        ("https://h/x?user=a&access_token=b%2Fc-long", "https://h/x?user=a&access_token=***"),
        ("--set model.key=value-of-a-key", "--set model.key=value-of-a-key"),
        ("https://h/?max_tokens=20 PWD=/home/me", "https://h/?max_tokens=20 PWD=/home/me"),
    ],
)
def test_addresses_in_messages(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_values_of_variables_are_shown_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Values of the configuration and the environment are replaced by their names. Paths and common words are kept."""
    for name, value in (
        ("MLFLOW_TRACKING_TOKEN", "marked-token\n"),
        ("RAY_AUTH_TOKEN_PATH", str(tmp_path)),
        ("DB_PASSWORD", "training"),
        ("API_KEY_VERSION", "2024-10-21"),
    ):
        monkeypatch.setenv(name, value)
    forget_all()
    remember_variable("DATA", "/data/coco")
    remember_variable("SEED", "7")
    text = f"/data/coco/a.jpg by b'Bearer marked-token\\n' of {tmp_path}, seed 7, training on 2024-10-21"
    shown = without_secrets(text)
    assert shown == text.replace("/data/coco", "${DATA}").replace("marked-token", "${MLFLOW_TRACKING_TOKEN}")


def test_a_word_is_not_masked_within_another_word() -> None:
    for name, value in (("A_PASSWORD", "abc123"), ("B_PASSWORD", "wordly"), ("C_PASSWORD", "123456")):
        remember_variable(name, value)
    text = "pre_abc123x wordlyness wordly 0.123456 123456"
    assert without_secrets(text) == "pre_${A_PASSWORD}x wordlyness ${B_PASSWORD} 0.123456 ${C_PASSWORD}"


SECRETS = (
    "GITHUB_PAT MYSQL_PWD AZURE_STORAGE_KEY PASSPHRASE SIGNING_KEY AWS_SESSION_TOKEN PGPASSWORD HF_TOKEN OPENAI_APIKEY "
    "AWS_ACCESS_KEY_ID SSH_KEY_PASSPHRASE JWT DEPLOY_KEY2 AWSAccessKeyId privateKey accessToken SESSION_COOKIE "
    "KEY key DBPASS DB_USERPASS ACCOUNTKEY AccountKey AUTHORIZATION"
)
NO_SECRETS = (
    "TOKENIZERS_PARALLELISM NCCL_DEBUG PATH PWD HOME KEYBOARD COMPASS BYPASS_CACHE code session GITHUB_PATH "
    "tokenizer tokens_per_word model.key"
)


def test_names_of_secrets() -> None:
    assert [name for name in SECRETS.split() if not is_secret_name(name)] == []
    assert [name for name in NO_SECRETS.split() if is_secret_name(name)] == []


def test_values_that_hold_secrets() -> None:
    for value in (
        *("https://ghp_x@host", "https://h/?password=long-one", "postgresql://u:p w/x@h/db", "https://u:${PW}x@h"),
        *("-----BEGIN RSA PRIVATE KEY-----\nabc", "x://u:${A}@h?pwd=bbbbbb", " https://u:p@h", "--token=keepsake"),
        *(
            f"{start}{3 * '0123456789abcdefXYZ'}"
            for start in ("sk-proj-", "ghp_", "github_pat_", "hf_", "xoxb-", "AIza", "glpat-", "npm_", "pypi-")
        ),
        *("AKIA0123456789ABCDEF", "eyJhbGciOi.0123456789"),
    ):
        assert holds_secret(value) and "0123456789" not in without_secrets(f"refused '{value}'"), value
    for value in (
        *("https://u:${PW}@h", "https://${TOKEN}@h", "s3://b/a@b.jpg", "https://h/?token=${T}", "a@b.org", ""),
        *("sqlite:////a@b/mlflow.db", "data.tokenizer=expansionnet", "model.max_tokens=5"),
        *("https://host:8443/a@b", "Authorization: Bearer ${TOKEN}", "password=${PW}", "git@h:x", "http://h:5000"),
        *("hf_internal-testing-model", "sk-captions-2024-train", "npm_config_cache", "/data/hf_datasets_coco2017"),
        *("/models/hf-swin-large-384-22k/model.safetensors", "s3://bucket/hf-datasets-mirror-eu1/coco"),
    ):
        assert not holds_secret(value), value


@pytest.mark.parametrize("part", ["-eyJ", ".eyJ", " eyJ", "://a:", "password=", ";a=", "${A}@"])
def test_the_time_for_a_text_grows_with_its_length_alone(part: str) -> None:
    """If it grew with the square of the length, each of these lines of a megabyte would take hours."""
    text = part * (2**20 // len(part))
    assert len(without_secrets(text)) > 0 and holds_secret(text) in (True, False)


def test_the_time_for_many_addresses_grows_with_their_number_alone() -> None:
    """If it grew with the square of the number, this would take minutes."""
    for index in range(20_000):
        remember_address(f"http://u:pass word'{index}@host")
    assert "word'19999" not in without_secrets("pass word'19999")
