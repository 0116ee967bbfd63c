"""Recognizes secrets and removes them from text.

Messages, log lines and stored texts pass through `without_secrets`, which removes

- the values of environment variables whose names suggest a secret;
- the variables and passwords of the configurations that this process has read, because a library may quote them;
- the user and password of any address, private keys, options such as `?token=...`, and keys whose beginning names their
  service, such as hf_... and ghp_....
"""

from __future__ import annotations

import functools
import os
import re
from urllib.parse import quote

MIN_SECRET = 6  # characters. Shorter values also occur in ordinary texts, so they do not count as secrets.
MASK = "***"
REFERENCE = re.compile(r"\$\{(\w+)\}")

_SECRET_NAME = re.compile(
    r"passw|passphrase|secret|token(?!iz|s_per)|credential|signature|(?:api|access|private|[_-])keys?(?![a-z])"
    r"|(?:access|account)key|^keys?\d*$|authorization|(?:db|user)pass(?![a-z])"
    r"|(?:^|[_-])(?:pass|pwd|pw|pat|sig|jwt|cookie|webhook|dsn)(?![a-z])",
    re.IGNORECASE,
)
_USERINFO = re.compile(
    r"""(?<=://)(?:
        [^\s/:@"']* :             # USER:
        (?! \d{1,5}/ )            # digits before a slash are a port and no password
        (?: (?!://) [^\s"'] )*    # PASSWORD, which ends at a blank, a quote or the next address
        | [^\s/"']*               # USER without a password
    )@""",
    re.VERBOSE,
)
_PRIVATE_KEY = re.compile("(PRIVATE KEY-----)[^-]+")
# keys of OpenAI, GitHub, Hugging Face, npm, GitLab, Slack, PyPI, AWS and Google, and JSON web tokens, each in its
# service's own form, because folders have names such as hf_datasets_coco2017
_SERVICE_KEY = re.compile(
    r"""(?<![\w.-])(?:
        sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}
        | (?:gh[oprsu]|hf|npm)_[A-Za-z0-9]{30,}
        | github_pat_\w{30,}
        | (?:glpat|xox[a-z])-(?=[\w-]*\d)[\w-]{20,}
        | pypi-[\w-]{50,}
        | (?:AKIA|ASIA)[A-Z0-9]{16}
        | AIza[\w-]{30,}
        | eyJ[\w-]{6,}\.[\w.-]{6,}
    )""",
    re.VERBOSE,
)
_OPTION = re.compile(r"""(?<![\w.-])([\w.-]+)=([^\s&;,"']+)""")

_masks: dict[str, str] = {}  # {text that must not be shown: what is shown in its place}


def is_secret_name(name: str) -> bool:
    """True if the name of a variable or option suggests a secret, such as GITHUB_PAT, DB_PWD or accessToken."""
    return name not in ("PWD", "OLDPWD") and _SECRET_NAME.search(name) is not None


def is_secret_option(name: str, value: str) -> bool:
    """True if NAME=VALUE is a secret: the name suggests one, and the value is not short (as in max_tokens=20)."""
    return len(value) >= MIN_SECRET and is_secret_name(name)


def holds_secret(text: str) -> bool:
    """True if a text contains the password of an address, an option such as password=..., or a key.

    A user name without a password counts as a secret, because it may be a token. A password that is a `${VARIABLE}` is
    no secret, and neither is its user name.
    """
    plain = REFERENCE.sub("", text)
    for userinfo in (split_userinfo(plain)[0], *(match[0][:-1] for match in _USERINFO.finditer(plain))):
        user, colon, password = userinfo.partition(":")
        if password or (user and not colon):
            return True
    has_secret_option = any(is_secret_option(*option.groups()) for option in _OPTION.finditer(plain))
    return has_secret_option or any(pattern.search(text) for pattern in (_PRIVATE_KEY, _SERVICE_KEY))


def split_userinfo(address: str) -> tuple[str, str]:
    """Splits an address into USER:PASSWORD and the address without them. USER:PASSWORD is "" if there is none.

    The password ends at the last @, as in SQLAlchemy. Digits before a slash are a port and no password.
    """
    scheme, separator, rest = address.strip().partition("://")
    userinfo, _, place = rest.rpartition("@")
    user, _, password = userinfo.partition(":")
    is_address = separator and re.fullmatch(r"[\w+.-]+", scheme)
    if not is_address or not userinfo or "/" in user or re.match(r"\d{1,5}/", password):
        return "", address
    return userinfo, f"{scheme}://{place}"


def remember_address(address: str) -> None:
    """Makes `without_secrets` mask the password of an address, or its user if there is no password."""
    user, _, password = split_userinfo(address)[0].partition(":")
    for form in _forms(password or user, MASK):
        _masks.setdefault(form, MASK)


def remember_variable(name: str, value: str) -> None:
    """Makes `without_secrets` replace the value of a configuration's variable by `${NAME}`."""
    _masks.update(_forms(value, f"${{{name}}}"))


def forget_all() -> None:
    """Forgets all remembered secrets, so that the next command in the same process begins without them."""
    _masks.clear()
    _masks_of_environment.cache_clear()


def without_secrets(text: str) -> str:
    """Returns a text in which the secrets that the top of this file lists are removed or masked."""
    masks = _masks_of_environment() | _masks  # a copy, because another thread may add secrets
    if masks:
        text = _any_of(frozenset(masks)).sub(lambda found: masks[found[0]], text)
    text = _SERVICE_KEY.sub(MASK, _PRIVATE_KEY.sub(rf"\1{MASK}", _USERINFO.sub("", text)))
    return _OPTION.sub(lambda found: f"{found[1]}={MASK}" if is_secret_option(*found.groups()) else found[0], text)


@functools.cache  # `forget_all` clears the cache
def _masks_of_environment() -> dict[str, str]:
    """{value: mask} of the environment variables whose names suggest a secret.

    Paths, lower-case words and dates are left out, because such values also occur in ordinary messages.
    """
    masks = dict[str, str]()
    for name, value in sorted(os.environ.items()):
        is_ordinary = re.match(r"[a-z]*$|[\d-]*$|[/~.]", value) is not None
        if is_secret_name(name) and not is_ordinary:
            masks |= _forms(value.strip(), f"${{{name}}}")  # a value that was read from a file may end with a line end
    return masks


def _forms(value: str, mask: str) -> dict[str, str]:
    """{form of a value: mask}: as it is, as Python prints it, as addresses quote it. Empty if the value is short."""
    if len(value) < MIN_SECRET:
        return {}
    return dict.fromkeys((value, repr(value)[1:-1], quote(value, safe="")), mask)


@functools.lru_cache(maxsize=4)
def _any_of(values: frozenset[str]) -> re.Pattern[str]:
    """A pattern that finds any of the values. A value of only letters or only digits must be a whole word."""
    patterns = (
        rf"(?<![\w.]){value}(?!\w)" if value.isalpha() or value.isdigit() else re.escape(value)
        for value in sorted(values, key=len, reverse=True)
    )
    return re.compile("|".join(patterns))
