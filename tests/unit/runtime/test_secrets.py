"""Secrets are recognized in addresses as SQLAlchemy and urllib read them, by names, and where an error quotes them."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote, urlsplit

import pytest
from sqlalchemy.engine import make_url

from raycap.pipeline.runtime.secrets import (
    forget_all,
    holds_secret,
    is_secret_name,
    is_secret_option,
    remember_address,
    remember_variable,
    split_userinfo,
    without_secrets,
)

ALPHABET = string.ascii_letters + string.digits + " /@%:?#&=+;,$!'\"\\()[]{}~^|<>é"


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    forget_all()
    yield
    forget_all()


def random_passwords(count: int) -> list[str]:
    source = random.Random(0)
    return ["".join(source.choices(ALPHABET, k=source.randint(4, 24))) for _ in range(count)]


@pytest.mark.parametrize("tail", ["@host/db", "@host:5432/db?sslmode=require", "@host"])
def test_every_password_that_sqlalchemy_or_urllib_reads_is_removed(tail: str) -> None:
    for password in random_passwords(500):
        address = f"postgresql://user:{password}{tail}"
        userinfo, public = split_userinfo(address)
        assert (userinfo, public) == (f"user:{password}", f"postgresql://{tail[1:]}")
        if "@" not in password:
            assert make_url(address).password == unquote(password), "SQLAlchemy reads it"
        if not set("@/?#[]") & set(password):
            assert urlsplit(address).password == password, "urllib reads it"


def test_what_libraries_make_of_a_password_is_masked_in_messages() -> None:
    for password in random_passwords(100):
        remember_address(f"http://user:{password}@host:5000")
        forms = password, quote(password, safe=""), quote_plus(password), repr(password)[1:-1]
        for form in (form for form in forms if len(form) >= 4):
            message = without_secrets(f"request to http://user:{form}@host:5000/api failed; password '{form}'")
            assert form not in message, (password, message)
        forget_all()
    remember_address("http://user:SEC/RET@host")  # urllib takes SEC for a port
    remember_address("postgresql://user:part@rest@host")
    message = without_secrets("Port could not be cast to integer: 'SEC/RET'; could not translate host name rest@host")
    assert message == "Port could not be cast to integer: '***'; could not translate host name ***@host"
    assert without_secrets("tokens; partly restful") == "tokens; partly restful", "only whole words"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://u:pw@host:5000/api and sqlite:////a@b/c.db", "see http://host:5000/api and sqlite:////a@b/c.db"),
        ("'https://ghp_token@host/x' refused", "'https://host/x' refused"),
        ("postgresql://u:a/b@c@host/db", "postgresql://host/db"),
        ("s3://bucket/photo@2x.png", "s3://bucket/photo@2x.png"),
        ("http://127.0.0.1:9000/bucket/photo@2x.png", "http://127.0.0.1:9000/bucket/photo@2x.png"),
        ("http://h:80 is down; mail a@b", "http://h:80 is down; mail a@b"),
        ("https://h/x?user=a&access_token=b&c=d", "https://h/x?user=a&access_token=***&c=d"),
        ("--set model.key=value", "--set model.key=value"),
        ("https://h/#access_token=b%2Fc", "https://h/#access_token=***"),
        ("'Authorization': 'Basic dTpw'; a Bearer", "'Authorization': 'Basic ***'; a Bearer"),
        ("Basic training of a Bearer without authentication", "Basic training of a Bearer without authentication"),
        ("code=5 session=6 PWD=/home/me", "code=5 session=6 PWD=/home/me"),
        ("train/Basic level02/x.jpg", "train/Basic level02/x.jpg"),
        ("https://h/?max_tokens=20", "https://h/?max_tokens=20"),
    ],
)
def test_addresses_in_messages(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_a_text_longer_than_any_address_is_not_remembered() -> None:
    """Its parts would be thousands of masks, for which every message is searched."""
    remember_address(f"x://user:{'part1/' * 1000}@host")
    assert without_secrets("a part1") == "a part1"


def test_values_of_variables_are_shown_by_name() -> None:
    remember_variable("DATA", "/data/coco")
    remember_variable("DB_PASSWORD", "abcd")
    remember_variable("SEED", "7")
    text = "/data/coco/a.jpg and abcd, seed 7"
    assert without_secrets(text) == "${DATA}/a.jpg and ${DB_PASSWORD}, seed 7"


def test_secrets_of_the_environment_are_masked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library quotes a header whose value ends with the line end of a file, and repeats a proxy's password."""
    forget_all()
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "marked-token\n")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "short")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path))
    monkeypatch.setenv("https_proxy", "me:proxy-word@host:3128")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:12/endpoint/word@host")
    header = f"Invalid header value {'Bearer marked-token' + chr(10)!r}".replace("'Bearer", "b'Bearer")
    assert "marked-token" in header and "marked-token" not in without_secrets(header)
    assert without_secrets("token marked-token.") == "token ${MLFLOW_TRACKING_TOKEN}."
    assert without_secrets(f"short {tmp_path} 'proxy-word' 12/endpoint/word") == f"short {tmp_path} '***' ***"


def test_values_are_masked_within_other_text() -> None:
    for secret in ("abc123", "longer-than-a-word"):
        remember_variable("DB_PASSWORD", secret)
        assert without_secrets(f"pre_{secret}x") == "pre_${DB_PASSWORD}x"
    remember_variable("DB_PASSWORD", "word")
    remember_variable("OTHER_PASSWORD", "1234")
    text = "words word 0.1234 1234"
    assert without_secrets(text) == "words ${DB_PASSWORD} 0.1234 ${OTHER_PASSWORD}"


SECRET_NAMES = (
    "GITHUB_PAT MYSQL_PWD AZURE_STORAGE_KEY PASSPHRASE DB_PWD SIGNING_KEY SECRETS TOKENS AWS_SESSION_TOKEN PGPASSWORD "
    "MLFLOW_TRACKING_PASSWORD HF_TOKEN AWS_ACCESS_KEY_ID DB_PASS OPENAI_APIKEY SSH_KEY_PASSPHRASE JWT TLS_PASSWD "
    "DB_PASSWORD1 GH_TOKEN2 TOKEN1 DEPLOY_KEY2 "
    "SECRETKEY AWSAccessKeyId privateKey SLACK_WEBHOOK_URL DBPASS "
    "accessToken CLIENT_SECRET GOOGLE_APPLICATION_CREDENTIALS SESSION_COOKIE NPM_CONFIG__AUTHTOKEN SAS_SIGNATURE"
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "PATH",
        "PWD",
        "HOME",
        "KEYBOARD",
        "COMPASS",
        "BYPASS_CACHE",
        *("code", "session", "auth", "TICKET"),
    ],
)
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "value",
    [
        *("https://ghp_x@host", "https://h/?password=x", "https://h/?a=b&token=x", "postgresql://u:p w/x@h/db"),
        *(
            "https://u:${PW}x@h",
            "Server=h;AccountKey=abc==",
            "-----BEGIN RSA PRIVATE KEY-----\nabc",
            "x://u:${A}@h?pwd=b",
            *(
                " https://u:p@h",
                "Authorization: Bearer abc",
                "https://h/#access_token=b",
            ),
        ),
    ],
)
def test_values_that_hold_secrets(value: str) -> None:
    assert holds_secret(value)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "https://u:${PW}@h",
            "https://${TOKEN}@h",
            "s3://b/a@b.jpg",
            "https://h/?token=${T}",
            "http://h:5000",
            "a@b.org",
        ),
        *("results", "sqlite:////a@b/mlflow.db", "data.tokenizer=spacy", "", "model.max_tokens=5", "sort_key=true"),
        *("https://host:8443/a@b", "Authorization: Bearer ${TOKEN}", "password=${PW}", "u:${PW}@h", "git@h:x"),
    ],
)
def test_values_that_hold_no_secrets(value: str) -> None:
    assert not holds_secret(value)


@pytest.mark.parametrize(
    "part", ["-eyJ", "eyJ-", "-eyJaaaaaaaaaa", "eyJ.", "Basic ", "://a:", "password=", ";a=", "ghp_"]
)
def test_the_time_for_a_text_grows_with_its_length_alone(part: str) -> None:
    """With its square, each of these lines of a megabyte would take hours."""
    text = part * (2**20 // len(part))
    assert len(without_secrets(text)) > 0 and holds_secret(text) in (True, False)


def test_common_words_of_the_environment_are_not_masked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results1").mkdir()
    for name, value in (
        ("DB_PASSWORD", "training"), ("API_KEY_VERSION", "2024-10-21"), ("HTTPS_PROXY", "http://data:data@proxy"),
        ("HTTP_PROXY", "http://validation@proxy"), ("MY_PASSWORD", "results1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    forget_all()
    text = "training and validation of data on 2024-10-21"
    assert without_secrets(text) == text
    assert without_secrets("login with results1 failed") == "login with ${MY_PASSWORD} failed", "a folder has its name"


def test_a_switch_of_tokens_is_no_secret() -> None:
    assert not holds_secret("--set backbone.prefix_tokens=keep") and not is_secret_option("prefix_tokens", "drop")
    assert holds_secret("--token=keepsake") and is_secret_option("password", "keep")
