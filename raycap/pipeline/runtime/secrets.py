"""Recognizes secrets and removes them from text.

Messages, log lines and stored texts pass through `without_secrets`. It removes

- the values of environment variables whose names say that they are secret;
- the variables and passwords of the configurations that this process has read, because a library may quote them;
- the user and password of any address, private keys, and options such as `?token=...`.
"""

from __future__ import annotations

import functools
import os
import re
from urllib.parse import quote

MIN_SECRET = 6  # characters; shorter values, such as numbers, also occur in ordinary texts
MASK = "***"
REFERENCE = re.compile(r"\$\{(\w+)\}")

_SECRET_NAME = re.compile(
    r"passw|passphrase|secret|token(?!iz|s_per)|credential|signature|(?:api|access|private|[_-])keys?(?![a-z])"
    r"|(?:access|account)key|^keys?\d*$|authorization|(?:db|user)pass(?![a-z])"
    r"|(?:^|[_-])(?:pass|pwd|pw|pat|sig|jwt|cookie|webhook|dsn)(?![a-z])",
    re.IGNORECASE,
)
# A password in a text ends at a blank or a quote. Digits before a slash are a port.
_USERINFO = re.compile(r"""(?<=://)(?:[^\s/:@"']*:(?!\d{1,5}/)(?:(?!://)[^\s"'])*|[^\s/"']*)@""")
_PRIVATE_KEY = re.compile("(PRIVATE KEY-----)[^-]+")
_OPTION = re.compile(r"""(?<![\w.-])([\w.-]+)=([^\s&;,"']+)""")

_masks: dict[str, str] = {}  # for each text that must not be shown, what is shown in its place


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or option suggests a secret, such as GITHUB_PAT, DB_PWD or accessToken."""
    return name not in ("PWD", "OLDPWD") and _SECRET_NAME.search(name) is not None


def is_secret_option(name: str, value: str) -> bool:
    """Whether NAME=VALUE is a secret by its name. A short value, such as that of max_tokens, is not."""
    return len(value) >= MIN_SECRET and is_secret_name(name)


def holds_secret(text: str) -> bool:
    """Whether a text holds a user or password of an address, an option such as password=..., or a private key.

    A user name is no secret if its password is a `${VARIABLE}`. Without a password it may be a token, so it is one.
    """
    plain = REFERENCE.sub("", text)
    found = [split_userinfo(plain)[0], *(match[0][:-1] for match in _USERINFO.finditer(plain))]
    parts = [userinfo.partition(":") for userinfo in found]
    return (
        any(password if separator else user for user, separator, password in parts)
        or any(is_secret_option(*option.groups()) for option in _OPTION.finditer(plain))
        or _PRIVATE_KEY.search(text) is not None
    )


def split_userinfo(address: str) -> tuple[str, str]:
    """Splits an address into its user and password, "" if it has none, and the rest.

    The password ends at the last @, as SQLAlchemy reads it. Digits before a slash are a port.
    """
    scheme, separator, rest = address.strip().partition("://")
    userinfo, _, place = rest.rpartition("@")
    user, _, password = userinfo.partition(":")
    is_address = separator and re.fullmatch(r"[\w+.-]+", scheme)
    if not is_address or not userinfo or "/" in user or re.match(r"\d{1,5}/", password):
        return "", address
    return userinfo, f"{scheme}://{place}"


def remember_address(address: str) -> None:
    """Remembers the password of an address, or its user if there is no password, as a secret."""
    user, _, password = split_userinfo(address)[0].partition(":")
    _masks.update(_forms(password or user, MASK) | _masks)


def remember_variable(name: str, value: str) -> None:
    """Remembers the value of a variable of the configuration. Messages then show `${NAME}` in its place."""
    _masks.update(_forms(value, f"${{{name}}}"))


def forget_all() -> None:
    """Forgets what was remembered, because another command begins in the same process."""
    _masks.clear()
    _masks_of_environment.cache_clear()


def without_secrets(text: str) -> str:
    """A text without users and passwords of addresses, values of secret options, and what was remembered."""
    if masks := _masks_of_environment() | _masks:  # a copy, because another thread may read a configuration meanwhile
        text = _any_of(frozenset(masks)).sub(lambda found: masks[found[0]], text)
    text = _PRIVATE_KEY.sub(rf"\1{MASK}", _USERINFO.sub("", text))
    return _OPTION.sub(lambda found: f"{found[1]}={MASK}" if is_secret_option(*found.groups()) else found[0], text)


@functools.cache  # until `forget_all`
def _masks_of_environment() -> dict[str, str]:
    """The values of secret names in this process's environment.

    Paths, lower-case words and dates are left out, because they also occur in ordinary messages.
    """
    masks = dict[str, str]()
    for name, value in sorted(os.environ.items()):
        is_ordinary = re.match(r"[a-z]*$|[\d-]*$|[/~.]", value) is not None
        if is_secret_name(name) and not is_ordinary:
            masks |= _forms(value.strip(), f"${{{name}}}")  # a file's line end is not part of a secret
    return masks


def _forms(value: str, mask: str) -> dict[str, str]:
    """The mask by form of a value: as it is, as Python prints it, as addresses quote it. Empty for short values."""
    forms = (value, repr(value)[1:-1], quote(value, safe="")) if len(value) >= MIN_SECRET else ()
    return dict.fromkeys(forms, mask)


@functools.lru_cache(maxsize=4)
def _any_of(values: frozenset[str]) -> re.Pattern[str]:
    """A pattern that finds any of the values. A value of letters only, or of digits only, is not found within words."""
    patterns = (
        rf"(?<![\w.]){value}(?!\w)" if value.isalpha() or value.isdigit() else re.escape(value)
        for value in sorted(values, key=len, reverse=True)
    )
    return re.compile("|".join(patterns))
