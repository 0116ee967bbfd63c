"""Recognizes secrets and removes them from text: in addresses, by the names of options, and values that were read.

Messages, log lines and stored texts pass through `without_secrets`. A process remembers the secrets of the
configuration that it has read and of its environment, because an error of a library may quote them.
"""

from __future__ import annotations

import functools
import os
import re
from urllib.parse import quote, quote_plus, unquote

MIN_SECRET = 4  # characters; shorter passwords are removed from addresses only, because they occur in words
MAX_ADDRESS = 4096  # characters; a longer text is no address
MIN_VALUE = 8  # the same for the environment, and for variables whose names do not look like a secret's
MASK = "***"

# The end of a word, and a whole word, in names such as WANDB_API_KEY, PGPASSWORD and accessToken
_SECRET_WORD = re.compile(
    r"(?:(?:PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|CREDENTIAL|APIKEY|(?:ACCESS|SECRET|ACCOUNT)KEY(?:ID)?|(?:DB|USER)PASS)S?\d*"
    r"|(?<![A-Z0-9])(?:KEY|PASS|PAT|PWD|PW|SIG|SIGNATURE|COOKIE|WEBHOOK|DSN|JWT|AUTHORIZATION)S?\d*)(?=_|$)"
)
_NO_SECRETS = ("PWD", "OLDPWD")  # the shell's folders
_PROXIES = re.compile(r"AWS_ENDPOINT_URL(_S3)?|\w+_PROXY", re.IGNORECASE)  # variables that may contain a password
_SCHEME = re.compile(r"[\w+.-]+")
_REFERENCE = re.compile(r"\$\{\w+\}")
_USERINFO = re.compile(r"[^:/]*(?::[^@]*)?@")  # at the begin of what follows ://, as SQLAlchemy reads an address
_USERINFO_OF_WEB = re.compile(r"[^:/]*(?::(?!\d{1,5}/)[^@]*)?@")  # the same, but digits before a slash are a port
# The same inside a text, where a password ends at a blank or a quote, and digits before a slash are a port
_USERINFO_IN_TEXT = re.compile(r"""(?<=://)(?:[^\s/:@"']*:(?!\d{1,5}/)(?:(?!://)[^\s"'])*|[^\s/"']*)@""")
_OPTION = re.compile(r"""(?<![^\s?&;#,"'])([\w.-]+)=([^\s&;,"']+)""")
_OPTION_OF_ADDRESS = re.compile(r"""([?&;#]\s*([\w.-]+)=)([^\s&;"']+)""")
_COUNT = re.compile(r"\d{1,7}|true|false|drop|keep", re.IGNORECASE)  # the value of an option such as max_tokens
# What is a secret in any text: the group remains, and what follows it is removed
_IN_TEXT = re.compile(
    r"""([Aa]uthorization['"]?\s*[:=]\s*b?['"]?(?:Bearer|Basic)\s+)[\w.~+/=-]+"""
    r"""|(-----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----)(?:(?!-----)[\s\S])+"""
)

_masks: dict[str, str] = {}  # what must not be shown, and what is shown in its place


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or option suggests a secret, such as GITHUB_PAT, DB_PWD or accessToken."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).upper()
    return name not in _NO_SECRETS and _SECRET_WORD.search(words) is not None


def holds_secret(text: str) -> bool:
    """Whether a text holds a user or password of an address, an option such as password=..., or a private key.

    A user beside a password that is a `${VARIABLE}` is no secret; a user alone may be a token.
    """
    plain = _REFERENCE.sub("", text)
    has_option = any(is_secret_option(*option.groups()) for option in _OPTION.finditer(unquote(plain)))
    if has_option or _IN_TEXT.search(text):
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
    """The secrets in this process's environment: values of secret names, and passwords of proxies and endpoints.

    The path of a file is none, nor is a lower-case word or a date, which occurs in messages of its own.
    """
    masks = dict[str, str]()
    for name, value in sorted(os.environ.items()):
        if _PROXIES.fullmatch(name):
            password = value.rpartition("@")[0].rpartition("://")[2].partition(":")[2]
            masks |= _forms(password, MASK, MIN_VALUE)
        elif is_secret_name(name) and not (re.fullmatch(r"[a-z]*|[\d-]*", value) or value.startswith(("/", "~", "."))):
            masks |= _forms(value.strip(), f"${{{name}}}", MIN_VALUE)  # a file's line end is not part of a secret
    return masks


def _forms(value: str, mask: str, min_length: int) -> dict[str, str]:
    """The mask for a value as it is, as Python prints it, and as addresses quote it; none for one that is too short."""
    if len(value) < min_length:
        return {}
    forms = (value, repr(value)[1:-1], quote(value, safe=""), quote(value), quote_plus(value))
    return dict.fromkeys(forms, mask)


def forget_all() -> None:
    """Forgets what was remembered, at the begin of another command in the same process."""
    _masks.clear()
    _masks_of_environment.cache_clear()


def without_secrets(text: str) -> str:
    """A text without users and passwords of addresses, values of secret options, and what was remembered."""
    if masks := _masks_of_environment() | _masks:  # a copy, because another thread may read a configuration meanwhile
        text = _any_of(frozenset(masks)).sub(lambda found: masks[found[0]], text)
    text = _USERINFO_IN_TEXT.sub("", text)
    text = _IN_TEXT.sub(lambda found: f"{found[found.lastindex or 0]}{MASK}", text)
    return _OPTION_OF_ADDRESS.sub(
        lambda found: f"{found[1]}{MASK}" if is_secret_option(found[2].lower(), found[3]) else found[0], text
    )


@functools.lru_cache(maxsize=4)
def _any_of(values: frozenset[str]) -> re.Pattern[str]:
    """A pattern that finds any of the values. Making it takes a hundred times as long as searching a line."""
    return re.compile("|".join(map(_pattern, sorted(values, key=len, reverse=True))))


def _pattern(value: str) -> str:
    """A pattern that finds a value. A word or number is not found within a longer one, other values anywhere."""
    if value.isalpha() or value.isdigit():
        return rf"(?<![\w.]){value}(?!\w)" if value.isdigit() else rf"\b{value}\b"
    return re.escape(value)
