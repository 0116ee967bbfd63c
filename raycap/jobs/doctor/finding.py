"""The result of one check of `raycap doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raycap.pipeline.runtime.secrets import without_secrets

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check, whose texts may quote an error: secrets are removed from them.

    level: `fail` means that a configuration cannot run, `warn` that a part of it will be missing, slower or delayed.
    """

    name: str
    level: Level
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "remedy"):
            object.__setattr__(self, name, without_secrets(getattr(self, name)))

    @property
    def line(self) -> str:
        """The finding as a line for the terminal."""
        return f"{self.level:<5} {self.name:<10} {self.text}" + (f"; {self.remedy}" if self.remedy else "")
