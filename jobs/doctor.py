"""`raycap doctor`: says what this machine or a cluster can and cannot do, each with its remedy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.cluster.doctor import Finding, as_json, examine
from pipeline.config.run import RunConfig


def doctor(
    config: Path | None,
    overrides: Sequence[str] = (),
    address: str | None = None,
    as_lines: bool = True,
) -> int:
    """Prints a line a check, or all as JSON. Returns 1 when something fails, so that CONFIG cannot run here.

    Raises UserError for a configuration that cannot be read.
    """
    findings: list[Finding] = []
    for finding in examine(_read(config, overrides), address):
        findings.append(finding)
        if as_lines:
            print(finding.line)
    found = as_json(findings)
    if not as_lines:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        failed = [finding.name for finding in findings if finding.level == "fail"]
        what = str(config) if config is not None else "raycap"
        print(f"{what} cannot run here: {', '.join(failed)}" if failed else f"{what} can run here")
    return 0 if found["ok"] else 1


def _read(path: Path | None, overrides: Sequence[str]) -> RunConfig | None:
    """A run's configuration, or the one that a search starts from."""
    from pipeline.config.load import parse_config, read_values

    if path is None:
        return None
    values = read_values(path, overrides)
    if "space" in values or "rows" in values:
        from pipeline.search.spec import load_search

        return load_search(path, overrides).base
    return parse_config(values)
