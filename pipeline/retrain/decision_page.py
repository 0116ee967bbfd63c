"""A decision about a champion as a page: why, both models' scores, and their captions side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.reports.page import Report, ReportImage, write_report
from pipeline.storage.path import StoragePath


def decision_page(
    config: RunConfig,
    body: Mapping[str, Any],
    part: Dataset | None = None,
    captions: Mapping[str, dict[int, str]] | None = None,
    scores: Mapping[int, float] | None = None,
) -> str:
    """The page of a decision record; with the held-out images (as many as a report shows) where there are some."""
    settings = config.evaluation
    rows = [(name, [f"{value:.4f}"]) for name, value in body.get("scores", {}).items() if value is not None]
    if body.get("difference"):
        gap = body["difference"]
        rows.append(("difference\npaired bootstrap", [f"{gap['mean']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}]"]))
    report = Report(
        title=f"{config.name}: {body['decision']}",
        run_id=f"decision {body['number']} of {body['time']}",
        protocol=f"{body['reason']}. Beam {settings.beam_size}, at most {settings.max_length} tokens",
        score_columns=["CIDEr-D"],
        score_rows=rows,
        stages=[],
        images=[] if part is None else _images(config, part, captions or {}, scores or {}),
        metadata=_facts(body),
    )
    with tempfile.TemporaryDirectory(prefix="raycap-") as scratch:
        path = Path(scratch) / "page.html"
        write_report(path, report)
        return path.read_text(encoding="utf-8")


def _facts(body: Mapping[str, Any]) -> dict[str, str]:
    facts = {"decision": body["decision"], "run": body["run"], "champion": body["champion"]["bundle"]}
    if body["champion_before"]:
        facts["champion before"] = body["champion_before"]["bundle"]
    if "data" in body:
        files, data = body["data"]["files"], body["data"]
        facts["data"] = (
            f"{data['images']} images, {data['new_images']} of them new; files: {files['added']} new, "
            f"{files['changed']} changed, {files['gone']} gone"
        )
        facts["data fingerprint"] = data["fingerprint"][:16]
        facts["held out"] = f"{body['held_out']['images']} images, {body['held_out']['name']}"
        facts["asked"] = f"margin {body['asked']['margin']:g}, confidence {100 * body['asked']['confidence']:g} %"
    return facts | {"snapshot": body["snapshot"]["name"]}


def _images(
    config: RunConfig, part: Dataset, captions: Mapping[str, dict[int, str]], scores: Mapping[int, float]
) -> list[ReportImage]:
    """The gallery, of which the page reads those that it shows."""
    ours, theirs = captions["challenger"], captions.get("champion", {})
    return [
        ReportImage(
            image,
            StoragePath(uri, config.storage.options),
            ours[image],
            references,
            scores.get(image),
            "held out",
            {"champion": theirs[image]} if image in theirs else {},
        )
        for image, uri, references in zip(*(part.column(name) for name in ("image_id", "uri", "captions")), strict=True)
        if image in ours
    ]
