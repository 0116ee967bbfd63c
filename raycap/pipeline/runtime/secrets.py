"""Recognizes secrets and removes them from text: in addresses, by the names of options, and values that were read.

Messages, log lines and stored texts pass through `without_secrets`. A process remembers the secrets of the
configuration that it has read and of its environment, because an error of a library may quote them in any form.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
from urllib.parse import quote, quote_plus, unquote

MIN_SECRET = 4  # characters; shorter passwords are removed from addresses only, because they occur in words
MAX_ADDRESS = 4096  # characters; a longer text is no address
MIN_VALUE = 8  # the same for the environment, and for variables whose names do not look like a secret's
MIN_LONG = 16  # shorter values without digits are found as whole words only
MASK = "***"

# The end of a word, and a whole word, in names such as WANDB_API_KEY, PGPASSWORD and accessToken
_SECRET_WORD = re.compile(
    r"(?:PASSW(?:OR)?D|PASSPHRASE|PASSCODE|SECRET|TOKEN|CREDENTIAL|CREDS?|COOKIE|SIGNATURE|WEBHOOK"
    r"|(?:API|ACCESS|SECRET|PRIVATE|PRIV|SIGNING|ENCRYPTION|ACCOUNT)KEY(?:ID)?|(?:USER|DB)PASS)S?"
    r"\d*(?=_|$)"
    r"|(?<![A-Z0-9])(?:KEY|PASS|PGPASS|PAT|PWD|PW|SIGNING|SIG|AUTHORIZATION|BEARER|JWT|DSN|CONNECTION_STRING)S?\d*(?=_|$)"
)
_NO_SECRETS = ("PWD", "OLDPWD")  # the shell's folders
_NO_VALUE = re.compile(r"[a-z]{,11}|\d{4}-\d\d-\d\d")  # words and dates, which occur in messages of their own
_ADDRESSES = re.compile(r"AWS_ENDPOINT_URL(_S3)?|\w+_PROXY", re.IGNORECASE)  # variables that may contain a password
_SCHEME = re.compile(r"[\w+.-]+")
_REFERENCE = re.compile(r"\$\{\w+\}")
_USERINFO = re.compile(r"[^:/]*(?::[^@]*)?@")  # at the begin of what follows ://, as SQLAlchemy reads an address
_USERINFO_OF_WEB = re.compile(r"[^:/]*(?::(?!\d{1,5}/)[^@]*)?@")  # the same, but digits before a slash are a port
# The same inside a text, where a password ends at a blank or a quote, and digits before a slash are a port
_USERINFO_IN_TEXT = re.compile(r"""(?<=://)(?:[^\s/:@"']*:(?!\d{1,5}/)(?:(?!://)[^\s"'])*|[^\s/"']*)@""")
_LOGIN = re.compile(r"[^\s:/@]+:[^\s/@]+@[\w.-]+(:\d{1,5})?/?")  # user:password@host, as of a proxy
_OPTION = re.compile(r"""(?<![^\s?&;#,"'])([\w.-]+)=([^\s&;,"']+)""")
# the value of an option such as max_tokens or backbone.prefix_tokens
_COUNT = re.compile(r"\d{1,7}|true|false|drop|keep", re.IGNORECASE)
_OPTION_OF_ADDRESS = re.compile(
    r"""((?:[?&;#]|;\s+(?=pwd=)|%3B|%26)([\w.-]+)(?:=|%3D))((?:[^\s&;"'%]|%(?!3B|26))+)""", re.IGNORECASE
)
# What is a secret wherever it occurs: the group remains, and what follows it is removed
_SECRETS_IN_TEXT = re.compile(
    r"""(\b(?:password|passwd|passphrase)\s?=\s?['"]?)(?!\*\*\*|\$\{)[^\s;&,"']+"""  # as in connection strings
    r"""|(["'](?:password|passwd|(?:secret_)?access_?key|secret_?key|api_?key|access_token|client_secret)["']\s?:\s?["'])"""
    r"""(?!\*\*\*|\$\{)[^"']+"""  # as in JSON
    r"""|(\b[Aa]uthorization['"]?\s*[:=]\s*b?['"]?(?:Bearer|Basic)\s+)[\w.~+/=-]+"""
    r"""|(\b(?:Bearer|Basic)\s+)(?=[\w.~+/-]*\d)(?=[\w.~+/-]*[A-Za-z])[\w.~+/=-]{16,}"""
    r"""|(-----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----)(?:(?!-----)[\s\S])+"""
    r"""|(hooks\.slack\.com/services/)\S+"""
    # the tokens of GitHub, Hugging Face, Slack, GitLab and AWS, and JSON Web Tokens
    r"""|()(?<![A-Za-z0-9])(?:gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|xox[abprs]-[\w-]{10,}"""
    r"""|glpat-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,})"""
    # it starts nowhere inside another one, or a long text of such starts would take quadratic time
    r"""|()(?<![\w-])eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"""
)

_masks: dict[str, str] = {}  # what must not be shown, and what is shown in its place


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or option suggests a secret, such as GITHUB_PAT, DB_PWD or accessToken."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).upper()
    return name not in _NO_SECRETS and _SECRET_WORD.search(words) is not None


def holds_secret(text: str) -> bool:
    """Whether a text holds a user or password of an address, an option such as password=..., a token or private key.

    A user beside a password that is a `${VARIABLE}` is no secret; a user alone may be a token.
    """
    plain = _REFERENCE.sub("", text)
    has_option = any(is_secret_option(*option.groups()) for option in _OPTION.finditer(unquote(plain)))
    if has_option or _SECRETS_IN_TEXT.search(text) or _LOGIN.fullmatch(plain.strip()):
        return True
    found = [split_userinfo(text)[0], *(match[0][:-1] for match in _USERINFO_IN_TEXT.finditer(text))]
    for userinfo in found:
        user, separator, password = userinfo.partition(":")
        if _REFERENCE.sub("", password if separator else user):
            return True
    return False


def is_secret_option(name: str, value: str) -> bool:
    """Whether NAME=VALUE is a secret by its name. A small number or a switch is one only as a password."""
    is_count = _COUNT.fullmatch(value) and re.search(r"(token|key)s?$", name, re.IGNORECASE)
    return is_secret_name(name) and not is_count


def split_userinfo(address: str) -> tuple[str, str]:
    """The user and password of an address, "" without them, and the address without them.

    The password ends at the last @, so that no part of one with /, @, ? or blanks remains.
    """
    scheme, separator, rest = address.strip().partition("://")
    pattern = _USERINFO_OF_WEB if scheme.lower() in ("http", "https") else _USERINFO
    if not separator or not _SCHEME.fullmatch(scheme) or not pattern.match(rest):
        return "", address
    userinfo, _, place = rest.rpartition("@")
    return userinfo, f"{scheme}://{place}"


def remember_address(address: str) -> None:
    """Remembers the password of an address, or its user if there is no password, as a secret."""
    user, _, password = split_userinfo(address if len(address) <= MAX_ADDRESS else "")[0].partition(":")
    secret = password or user
    parts = re.split(r"[@/?#:]", secret)  # a library that reads the address otherwise may take a part for the host
    for text in (secret, unquote(secret), *parts):
        _masks.update(_forms(text, MASK, MIN_SECRET) | _masks)


def remember_variable(name: str, value: str) -> None:
    """Remembers the value of a variable of the configuration. Messages then show `${NAME}` in its place."""
    _masks.update(_forms(value, f"${{{name}}}", MIN_SECRET if is_secret_name(name) else MIN_VALUE))


@functools.cache  # until `forget_all`
def _masks_of_environment() -> dict[str, str]:
    """The secrets in this process's environment: values of secret names, and passwords of proxies and endpoints."""
    masks = dict[str, str]()
    for name, value in sorted(os.environ.items()):
        if _ADDRESSES.fullmatch(name):
            password = value.rpartition("@")[0].rpartition("://")[2].partition(":")[2]
            masks |= _forms(password, MASK, MIN_VALUE)
        elif is_secret_name(name) and not (_NO_VALUE.fullmatch(value) or _names_a_file(name, value)):
            masks |= _forms(value.strip(), f"${{{name}}}", MIN_VALUE)  # a file's line end is not part of a secret
    return masks


def _names_a_file(name: str, value: str) -> bool:
    """Whether the value of a variable is the path of a file, which contains the secret."""
    is_path = value.startswith(("/", "~", ".")) or name.upper().endswith(("FILE", "PATH", "DIR", "CREDENTIALS"))
    return is_path and os.path.exists(os.path.expanduser(value))  # noqa: PTH110, PTH111 - not every value is a path


def _forms(value: str, mask: str, min_length: int) -> dict[str, str]:
    """The mask for each form in which a library may quote a value; none for a value that is too short."""
    if len(value) < min_length:
        return {}
    escaped = value.encode("unicode_escape").decode()
    quoted = (quote(value, safe=""), quote(value), quote_plus(value), quote(value, safe="!#$%&'()*+,/:;=?@[]~"))
    forms = {
        *(value, " ".join(value.split()), html.escape(value), escaped, escaped.replace("'", r"\'")),
        *(repr(value)[1:-1], repr(value.encode())[2:-1], json.dumps(value)[1:-1]),
        *(json.dumps(value, ensure_ascii=False)[1:-1], *quoted),
        *(re.sub("%..", lambda found: found[0].lower(), form) for form in quoted),
    }
    return {form: mask for form in forms if len(form) >= min_length}


def forget_all() -> None:
    """Forgets what was remembered, at the begin of another command in the same process."""
    _masks.clear()
    _masks_of_environment.cache_clear()


def without_secrets(text: str) -> str:
    """A text without users and passwords of addresses, values of secret options, and what was remembered."""
    if masks := _masks_of_environment() | _masks:  # a copy, because another thread may read a configuration meanwhile
        text = _any_of(frozenset(masks)).sub(lambda found: masks[found[0]], text)
    text = _USERINFO_IN_TEXT.sub("", text)
    text = _SECRETS_IN_TEXT.sub(lambda found: f"{found[found.lastindex or 0]}{MASK}", text)
    # lower case: in an address, PWD is not the shell's folder
    return _OPTION_OF_ADDRESS.sub(
        lambda found: f"{found[1]}{MASK}" if is_secret_option(found[2].lower(), found[3]) else found[0], text
    )


@functools.lru_cache(maxsize=4)
def _any_of(values: frozenset[str]) -> re.Pattern[str]:
    """A pattern that finds any of the values. Making it takes a hundred times as long as searching a line."""
    return re.compile("|".join(map(_pattern, sorted(values, key=len, reverse=True))))


def _pattern(value: str) -> str:
    """A pattern that finds a value. A word or number is not found within a longer one, other values anywhere.

    A word may follow an escape such as the two characters of a line end.
    """
    if value.isdigit():
        return rf"(?<![\d.]){value}(?![\d.])"
    if len(value) >= MIN_LONG or re.search(r"\d", value):
        return re.escape(value)
    begin = r"(?:\b|(?<=\\[abfnrtv]))" if re.match(r"\w", value) else ""
    return f"{begin}{re.escape(value)}" + (r"\b" if re.search(r"\w$", value) else "")
