"""Recognizes secrets and removes them from text: in addresses, by the names of options, and values that were read.

Messages, log lines and stored texts pass through `without_secrets`. A process remembers the secrets of the
configuration that it has read, because an error of a library may quote them in any form.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

MIN_SECRET = 4  # characters; shorter passwords are removed from addresses only, because they occur in words
MAX_ADDRESS = 4096  # characters; a longer text is no address
MIN_VALUE = 8  # the same for the values of variables whose names do not look like a secret's
MASK = "***"

# The end of a word, and a whole word, in names such as WANDB_API_KEY, PGPASSWORD and accessToken
_SECRET_WORD = re.compile(
    r"(?:PASSW(?:OR)?D|PASSPHRASE|PASSCODE|SECRET|TOKEN|CREDENTIAL|CREDS?|COOKIE|SIGNATURE|(?:API|ACCESS)KEY)S?"
    r"\d*(?=_|$)"
    r"|(?<![A-Z0-9])(?:KEY|PASS|PGPASS|PAT|PWD|PW|SIGNING|SIG|AUTHORIZATION|BEARER|JWT|DSN|CONNECTION_STRING)S?\d*(?=_|$)"
)
_NO_SECRETS = ("PWD", "OLDPWD")  # the shell's folders
_SCHEME = re.compile(r"[\w+.-]+")
_REFERENCE = re.compile(r"\$\{\w+\}")
_USERINFO = re.compile(r"[^:/]*(?::[^@]*)?@")  # at the begin of what follows ://, as SQLAlchemy reads an address
_USERINFO_OF_WEB = re.compile(r"[^:/]*(?::(?!\d{1,5}/)[^@]*)?@")  # the same, but digits before a slash are a port
# The same inside a text, where a password ends at a blank or a quote, and digits before a slash are a port
_USERINFO_IN_TEXT = re.compile(r"""(?<=://)(?:[^\s/:@"']*:(?!\d{1,5}/)(?:(?!://)[^\s"'])*|[^\s/"']*)@""")
_OPTION = re.compile(r"""(?<![^\s?&;,"'])([\w.-]+)=([^\s&;,"']+)""")
_COUNT = re.compile(r"\d{1,7}|true|false", re.IGNORECASE)  # the value of an option such as max_tokens
_OPTION_OF_ADDRESS = re.compile(r"""(?<=[?&;])([\w.-]+)=[^\s&;"']+""")  # ?password=..., ;AccountKey=...
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")

_masks: dict[str, str] = {}  # what must not be shown, and what is shown in its place
_variables: dict[str, str] = {}  # the values of the configuration's `${VARIABLE}`s


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or option suggests a secret, such as GITHUB_PAT, DB_PWD or accessToken."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).upper()
    return name not in _NO_SECRETS and _SECRET_WORD.search(words) is not None


def holds_secret(text: str) -> bool:
    """Whether a text holds a user or password of an address, an option such as password=..., or a private key.

    A user beside a password that is a `${VARIABLE}` is no secret; a user alone may be a token.
    """
    if _PRIVATE_KEY.search(text) or any(map(_is_secret_option, _OPTION.finditer(_REFERENCE.sub("", text)))):
        return True
    found = [split_userinfo(text)[0], *(match[0][:-1] for match in _USERINFO_IN_TEXT.finditer(text))]
    for userinfo in found:
        user, separator, password = userinfo.partition(":")
        if _REFERENCE.sub("", password if separator else user):
            return True
    return False


def _is_secret_option(option: re.Match[str]) -> bool:
    """Whether NAME=VALUE is a secret by its name. A small number is one only as a password."""
    name, value = option.groups()
    is_count = _COUNT.fullmatch(value) and re.search(r"(token|key)s?$", name, re.IGNORECASE)
    return is_secret_name(name) and not is_count


def split_userinfo(address: str) -> tuple[str, str]:
    """The user and password of an address, "" without them, and the address without them.

    The password ends at the last @, so that no part of one with /, @, ? or blanks remains.
    """
    scheme, separator, rest = address.partition("://")
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
    for text in (secret, unquote(secret), quote(secret, safe=""), quote(unquote(secret), safe=""), *parts):
        if len(text) >= MIN_SECRET:
            _masks.setdefault(text, MASK)


def remember_variable(name: str, value: str) -> None:
    """Remembers the value of a variable of the configuration. Messages then show `${NAME}` in its place."""
    _variables[name] = value
    if len(value) >= (MIN_SECRET if is_secret_name(name) else MIN_VALUE):
        _masks[value] = f"${{{name}}}"


def remembered_variables() -> dict[str, str]:
    """The values of all variables that were remembered, by name."""
    return dict(_variables)


def forget_all() -> None:
    """Forgets what was remembered, at the begin of another command in the same process."""
    _masks.clear()
    _variables.clear()


def without_secrets(text: str) -> str:
    """A text without users and passwords of addresses, values of secret options, and what was remembered."""
    if masks := _masks.copy():  # another thread may read a configuration meanwhile
        longest_first = "|".join(map(_whole_words, sorted(masks, key=len, reverse=True)))
        text = re.sub(longest_first, lambda found: masks[found[0]], text)
    text = _USERINFO_IN_TEXT.sub("", text)
    return _OPTION_OF_ADDRESS.sub(lambda found: f"{found[1]}={MASK}" if is_secret_name(found[1]) else found[0], text)


def _whole_words(value: str) -> str:
    """A pattern that finds a value, but not within a longer word."""
    begin, end = (r"\b" if re.match(r"\w", char) else "" for char in (value[0], value[-1]))
    return f"{begin}{re.escape(value)}{end}"
