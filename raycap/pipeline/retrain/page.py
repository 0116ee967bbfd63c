"""The HTML page of a decision about the champion: the reason, and both models' scores and captions."""

from __future__ import annotations

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.evaluation.reports.page import Report, ReportImage, report_html
from raycap.pipeline.evaluation.reports.report import report_images
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.retrain.champion import Decision


def decision_page(
    config: RunConfig,
    decision: Decision,
    part: Dataset | None = None,
    challenger: SplitScores | None = None,
    champion: SplitScores | None = None,
) -> str:
    """The HTML of a decision.

    part: the held-out images, of which the page shows as many as a report does. challenger, champion: their captions
    and scores on these images. A rollback has none of the three.
    """
    settings, images = config.evaluation, list[ReportImage]()
    if part is not None and challenger is not None:
        images = report_images(challenger, part, config.storage.options, champion, "champion")
    return report_html(
        Report(
            title=f"{config.name}: {decision.decision}",
            run_id=f"decision {decision.number} of {decision.time}",
            protocol=f"{decision.reason}. Beam {settings.beam_size}, at most {settings.max_length} tokens",
            score_columns=["CIDEr-D"],
            score_rows=_score_rows(decision),
            stages=[],
            images=images,
            metadata=_metadata(decision),
            language=config.data.language,
        )
    )


def _score_rows(decision: Decision) -> list[tuple[str, list[str]]]:
    """The rows (label, cells) with both scores and their difference; none for a rollback."""
    scores = decision.scores.model_dump() if decision.scores else {}
    rows = [(name, [f"{score:.4f}"]) for name, score in scores.items() if score is not None]
    if decision.difference is not None:
        rows.append(("difference\npaired bootstrap", [str(decision.difference)]))
    return rows


def _metadata(decision: Decision) -> dict[str, str]:
    """The facts that the page lists below the images."""
    metadata = {"decision": decision.decision, "run": decision.run, "champion": decision.champion.bundle}
    if decision.champion_before is not None:
        metadata["champion before"] = decision.champion_before.bundle
    if (data := decision.data) is not None:
        metadata["data"] = f"{data.images} images, {data.new_images} of them new; files: {data.files}"
        metadata["data fingerprint"] = (data.fingerprint or "")[:16]
    if decision.held_out is not None:
        metadata["held out"] = f"{decision.held_out.images} images, {decision.held_out.name}"
    if decision.asked is not None:
        margin, confidence = decision.asked["margin"], decision.asked["confidence"]
        metadata["required"] = f"margin {margin:g}, confidence {100 * confidence:g} %"
    return metadata | {"snapshot": decision.snapshot.name}
