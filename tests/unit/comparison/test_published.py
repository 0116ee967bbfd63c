"""The paired bootstrap, and which published scores can be compared with ours."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycap.pipeline.evaluation.comparison.bootstrap import paired_difference
from raycap.pipeline.evaluation.comparison.protocol import Protocol
from raycap.pipeline.evaluation.comparison.published import published_rows

COCO = [f"/data/val2014/COCO_val2014_{number:012d}.jpg" for number in range(5000)]
TEST2014 = [f"/data/test2014/COCO_test2014_{number:012d}.jpg" for number in range(40_775)]
IN, NEAR, OUT = (["s3://nocaps/" + f"{number:016x}.jpg" for number in range(count)] for count in (648, 2938, 914))
SEARCH: dict[str, Any] = {"beam_size": 5, "precision": "float32"}
EXPANSION = Protocol(
    "expansionnet_v2", "grid", False, "scst", True, max_length=74, ranking="mean", collapse_repeats=False, **SEARCH
)
XE = replace(EXPANSION, objective="cross_entropy", eos_in_reward=None)
NOCAPS: dict[str, Any] = {"objective": "cross_entropy", "eos_in_reward": None, "beam_size": 3}
MESHED = Protocol(
    "meshed_memory", "regions", True, "scst", False, max_length=21, ranking="sum", collapse_repeats=True, **SEARCH
)
CLUSTERS = Protocol(
    "clustformer", "grid", False, "scst", True, max_length=20, ranking="mean", collapse_repeats=False, **SEARCH
)
SINGLE, ENSEMBLE = "ExpansionNet v2, SCST (paper)", "ExpansionNet v2, ensemble, SCST (paper)"
NEAR_ROW = "ExpansionNet v2, nocaps near-domain (paper)"
MESHED_ROW = "Meshed-Memory Transformer, SCST (paper)"
GRID_ROW = "Ada-ClustFormer, grid features, SCST (paper)"
EXPANSION_SERVER = "ExpansionNet v2, ensemble, COCO server, 40 references (paper)"
MESHED_OUT = "Meshed-Memory Transformer, nocaps out-of-domain, constrained (paper)"

# ours, split, images, the published row, and the parts of the reason (none if comparable)
PAIRS: tuple[tuple[Protocol, str, list[str], str, tuple[str, ...]], ...] = (
    (EXPANSION, "test", COCO, SINGLE, ()),
    (EXPANSION, "test", COCO, ENSEMBLE, ("published: an ensemble, ours: one model",)),
    (replace(EXPANSION, num_models=4), "test", COCO, ENSEMBLE, ()),
    (EXPANSION, "test", COCO, "ExpansionNet v2, cross entropy (paper)", ("published: cross entropy, ours: SCST",)),
    (replace(EXPANSION, objective=None), "test", COCO, SINGLE, ("published: SCST, ours: not recorded",)),
    (EXPANSION, "test", COCO[:-1], SINGLE, ("5,000 images of Karpathy's COCO test split, ours: 4,999",)),
    (replace(EXPANSION, beam_size=3), "test", COCO, SINGLE, ("published: beam 5, ours: beam 3",)),
    (replace(EXPANSION, constrained=True), "test", COCO, SINGLE, ("no constraints, ours: constraints",)),
    (replace(XE, beam_size=3), "near-domain", NEAR, NEAR_ROW, ()),
    (XE, "in-domain", IN, "ExpansionNet v2, nocaps in-domain (paper)", ("published: beam 3, ours: beam 5",)),
    (MESHED, "test", COCO, MESHED_ROW, ()),
    (replace(MESHED, constrained=True, **NOCAPS), "out-domain", OUT, MESHED_OUT, ()),
    (replace(EXPANSION, num_models=4), "test2014", TEST2014, EXPANSION_SERVER, ()),
    (CLUSTERS, "test", COCO, GRID_ROW, ()),
    (
        replace(MESHED, eos_in_reward=True, max_length=20),
        "test",
        COCO,
        MESHED_ROW,
        ("no EOS in the reward, ours: EOS in the reward", "at most 21 tokens, ours: at most 20 tokens"),
    ),
)


@pytest.mark.parametrize(("ours", "split", "uris", "name", "reasons"), PAIRS)
def test_every_difference_is_named_and_nothing_else(
    ours: Protocol, split: str, uris: list[str], name: str, reasons: tuple[str, ...]
) -> None:
    (difference,) = [text for row, text in published_rows(ours, split, uris) if row.name == name]
    if not reasons:
        assert difference == ""
        return
    assert difference.startswith("not comparable: published: ") and difference.count("; ") == len(reasons) - 1
    assert all(reason in difference for reason in reasons)


def test_the_rows_are_those_of_the_papers(shared: Path) -> None:
    """Compared with an independent transcription of the papers' tables."""
    tables = json.loads((shared / "paper_tables.json").read_text())
    columns = {
        "B1": "BLEU-1",
        "B2": "BLEU-2",
        "B3": "BLEU-3",
        "B4": "BLEU-4",
        "M": "METEOR",
        "R": "ROUGE-L",
        "C": "CIDEr-D",
        "S": "SPICE",
        "count": "SPICE count",
    }

    def published(system: str, split: str, **protocol: Any) -> dict[str, float]:
        rows = [row for row, _ in published_rows(replace(EXPANSION, system=system), split, COCO)]
        (row,) = [
            row
            for row in rows
            if all((vars(row) | vars(row.protocol))[key] == value for key, value in protocol.items())
        ]
        return row.scores

    expansion, meshed = tables["expansionnet_v2"], tables["meshed_memory_transformer"]
    cases = [
        (published("expansionnet_v2", "test", objective=objective, num_models=models), expansion[key][stage])
        for models, key in ((1, "karpathy_test_single"), (0, "karpathy_test_ensemble"))
        for objective, stage in (("cross_entropy", "xe"), ("scst", "scst"))
    ]
    domains = (("in-domain", "in", "in"), ("out-domain", "out", "out"), ("all", "all", "overall"))
    for split, theirs, overall in domains:
        cases.append((published("expansionnet_v2", split), expansion["nocaps_val"][theirs]))
        cases.append((published("meshed_memory", split, constrained=False), meshed["nocaps_val"][overall]))
        constrained = meshed["nocaps_val"]["with_constrained_beam_search"][overall]
        cases.append((published("meshed_memory", split, constrained=True), constrained))
    count = {"count": 20.4}  # of Table 8, whose other sub-categories of SPICE are illegible
    for models, key, more in ((1, "single", count), (2, "ensemble_2", {}), (4, "ensemble_4", {})):
        cases.append((published("meshed_memory", "test", num_models=models), meshed[f"karpathy_test_{key}"] | more))
    cases.append((published("expansionnet_v2", "near-domain"), expansion["nocaps_val"]["near"]))
    for features, row in tables["ada_clustformer"]["karpathy_test"].items():
        for objective, stage in (("cross_entropy", "xe"), ("scst", "scst")):
            cases.append((published("clustformer", "test", features=features, objective=objective), row[stage]))
    letters = ("B4", "M", "R", "C")
    online = {
        "ExpansionNet v2, ensemble": ("expansionnet_v2", expansion["online_server"]),
        "Meshed-Memory Transformer, ensemble of 4": ("meshed_memory", meshed["online_server"]),
    }
    for features, name in (("grid", "grid"), ("regions", "region")):
        row = tables["ada_clustformer"]["online_server_single"][features]
        named = {key: dict(zip(letters, row[key], strict=True)) for key in ("c5", "c40")}
        online[f"Ada-ClustFormer, {name} features"] = ("clustformer", named)
    for start, (system, row) in online.items():
        for count in (5, 40):
            name = f"{start}, COCO server, {count} references (paper)"
            cases.append((published(system, "test2014", name=name), row[f"c{count}"]))
    for scores, expected in cases:
        assert scores == {columns[key]: pytest.approx(value / 100) for key, value in expected.items() if key in columns}


def test_the_interval_is_the_normal_one_for_many_images() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(1.0, 0.5, 4000), generator.normal(0.95, 0.5, 4000)
    difference = paired_difference([a.tolist()], [b.tolist()])
    error = (a - b).std() / np.sqrt(len(a))
    assert difference.mean == pytest.approx((a - b).mean(), abs=1e-12)
    assert difference.low == pytest.approx(difference.mean - 1.96 * error, abs=0.1 * error)
    assert difference.high == pytest.approx(difference.mean + 1.96 * error, abs=0.1 * error)
    assert paired_difference([a.tolist()], [b.tolist()]) == difference, "equal input gives an equal interval"


def test_the_interval_covers_the_true_mean_at_its_confidence() -> None:
    generator, inside = np.random.default_rng(1), 0
    for trial in range(200):
        difference = paired_difference([generator.normal(0.1, 1, 80).tolist()], [[0.0] * 80], resamples=500, seed=trial)
        inside += difference.low <= 0.1 <= difference.high
    assert 0.88 <= inside / 200 <= 0.99


def simulated(generator: np.random.Generator, seeds: int, seed_effects: float, images: np.ndarray) -> np.ndarray:
    """Scores (seeds, images), which are sums of normal effects: of a seed, of an image, and of a seed on an image."""
    own = generator.normal(0, 0.5, (seeds, len(images)))
    return generator.normal(0, seed_effects, (seeds, 1)) + images + own


@pytest.mark.parametrize(
    ("counts", "seed_effects"), [((3, 3), 0.0), ((3, 3), 0.02), ((4, 5), 0.1), ((2, 2), 0.1), ((1, 5), 0.1)]
)
def test_the_interval_covers_the_true_difference_of_systems_with_seeds(
    counts: tuple[int, int], seed_effects: float
) -> None:
    """400 simulations of 500 images. The seeds' effects range from none to several times the images' error of 0.03."""
    generator, inside = np.random.default_rng(2), 0
    for trial in range(400):
        images = generator.normal(1, 0.7, 500)
        a, b = (simulated(generator, count, seed_effects, images) for count in counts)
        difference = paired_difference(a + 0.1, b, resamples=300, seed=trial)  # type: ignore[arg-type]
        inside += difference.low <= 0.1 <= difference.high
    assert 0.92 <= inside / 400 <= 0.99
