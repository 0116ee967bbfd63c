"""The page of `raycap serve`: one HTML file without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from pathlib import Path

PAGE = Path(__file__).with_name("caption_page.html")


@lru_cache
def page() -> str:
    """The page's HTML."""
    return PAGE.read_text(encoding="utf-8")


@lru_cache
def content_security_policy() -> str:
    """A policy that allows the page's own style and script, images that the user chose, and requests to the server."""
    digests = {}
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)
        digests[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; script-src 'sha256-{digests['script']}'; "
        "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
