"""`raycap reproduce`: evaluates the published checkpoints on COCO and compares the scores with the printed ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jobs.evaluate import evaluate
from jobs.import_ import import_checkpoint
from jobs.options import Address, Set
from pipeline.errors import UserError
from pipeline.reports.text_table import format_table
from pipeline.storage.atomic import read_json
from pipeline.untrusted.names import shown
from pipeline.version import project_root

logger = logging.getLogger(__name__)

EXPANSIONNET = "github.com/jchenghu/ExpansionNet_v2"
MESHED_MEMORY = "github.com/aimagelab/meshed-memory-transformer"
SPLITS = "dataset_coco.json"
COCO = {SPLITS: f"Karpathy's splits, in the drive that the README of {EXPANSIONNET} links"}
TOLERANCE = 0.005  # of CIDEr-D: the papers print three digits, and libraries resize and decode images differently


@dataclass(frozen=True)
class Published:
    """A published model. files: {name: what it is and where it is}, besides those of COCO.

    row: the name of the printed row that it should reproduce. settings: keys of the evaluation by file name.
    """

    title: str
    row: str
    config: str
    checkpoint: str
    tokens: str
    files: Mapping[str, str]
    settings: Mapping[str, str]


PUBLISHED = {
    "expansionnet_v2": Published(
        "ExpansionNet v2",
        "ExpansionNet v2, SCST (paper)",
        "expansionnet_v2_coco.yaml",
        "rf_model.pth",
        "demo_coco_tokens.pickle",
        {
            "rf_model.pth": f"the checkpoint, linked in the README of {EXPANSIONNET}",
            "demo_coco_tokens.pickle": f"its vocabulary, in demo_material/ of {EXPANSIONNET}",
            **COCO,
            "val2014": "the folder of COCO's validation images, from val2014.zip of cocodataset.org",
        },
        {},
    ),
    "meshed_memory": Published(
        "Meshed-Memory Transformer",
        "Meshed-Memory Transformer, SCST (paper)",
        "meshed_memory_published_coco.yaml",
        "meshed_memory_transformer.pth",
        "vocab.pkl",
        {
            "meshed_memory_transformer.pth": f"the checkpoint, linked in the README of {MESHED_MEMORY}",
            "vocab.pkl": f"its vocabulary, in {MESHED_MEMORY}",
            **COCO,
            "coco_detections.hdf5": f"the region features, linked in the README of {MESHED_MEMORY}",
        },
        {"features.hdf5": "coco_detections.hdf5"},
    ),
}


def reproduce(
    folder: Annotated[
        Path, typer.Argument(help="The folder with a published checkpoint, its vocabulary and COCO.", metavar="FOLDER")
    ],
    system: Annotated[
        Literal["expansionnet_v2", "meshed_memory"] | None,
        typer.Option(help="expansionnet_v2 or meshed_memory; by default those whose checkpoints are there."),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="The output folder.")] = Path("results/reproduce"),
    set_: Set = None,
    address: Address = None,
) -> int:
    """Evaluate published checkpoints on Karpathy's test split beside the papers' scores.

    Without the files it says which to bring, and from where. --set changes keys of the import (model., backbone.) and
    of the evaluation. The exit code is 1 when an image cannot be read, or when scores that can be compared differ.

    Example: raycap reproduce /path/to/files --system expansionnet_v2
    """
    systems = [system] if system else [name for name, each in PUBLISHED.items() if (folder / each.checkpoint).is_file()]
    if not systems:
        checkpoints = " or ".join(f"{each.checkpoint} ({each.files[each.checkpoint]})" for each in PUBLISHED.values())
        raise UserError(f"{folder} has no published checkpoint; bring {checkpoints}")
    for name in systems:
        _require_files(folder, PUBLISHED[name])
    return max(_reproduce(name, folder, out / name, set_ or (), address) for name in systems)


def _require_files(folder: Path, published: Published) -> None:
    """Raises UserError that names the files that are missing, and where they are."""
    missing = [f"{name} ({what})" for name, what in published.files.items() if not (folder / name).exists()]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}; {published.title} needs all of its files in this folder")


def _reproduce(system: str, folder: Path, out: Path, overrides: Sequence[str], address: str | None) -> int:
    """Imports and evaluates one system. Returns the exit code."""
    published, bundle = PUBLISHED[system], out / "bundle"
    of_import = [override for override in overrides if override.startswith(("model.", "backbone."))]
    if (bundle / "config.yaml").is_file():
        logger.info(f"bundle    {bundle} is there; remove it to import the checkpoint again")
    else:
        import_checkpoint(
            system,  # type: ignore[arg-type]
            checkpoint=folder / published.checkpoint,
            tokens=folder / published.tokens,
            out=bundle,
            overrides=of_import,
            objective="scst",
        )
    others = [override for override in overrides if override not in of_import]
    config = project_root() / "configs" / published.config
    code = evaluate(
        config,
        [*_settings(published, folder, out), *others],
        splits=["test"],
        models=[str(bundle)],
        out=str(out / "evaluation"),
        address=address,
    )
    scores = read_json(out / "evaluation" / "scores.json")["splits"]["test"]
    is_reproduced = _compare(published, scores)
    logger.info(f"reproduced   {out / 'evaluation' / 'report-test.html'}")
    return code or int(not is_reproduced)


def _settings(published: Published, folder: Path, out: Path) -> list[str]:
    """The keys that select the files, the output folder and this machine's GPU, if it has one."""
    import torch

    num_gpus = min(1, torch.cuda.device_count())
    texts = {"data.root": folder, "storage": out / "storage"}
    texts |= {key: folder / name for key, name in published.settings.items()}
    numbers = {"workers.num_workers": 1, "workers.cpus_per_worker": 1}
    numbers |= {"workers.gpus_per_worker": num_gpus, "features.gpus_per_actor": num_gpus}
    quoted = [f"{key}={json.dumps(str(path.absolute()))}" for key, path in texts.items()]
    return quoted + [f"{key}={value}" for key, value in numbers.items()]


def _compare(published: Published, scores: dict[str, Any]) -> bool:
    """Prints our scores beside the printed row. False if they can be compared and CIDEr-D differs."""
    (row,) = (row for row in scores["published"] if row["name"] == published.row)
    columns = [name for name in row["scores"] if name in scores["scores"]]
    printed = {name: row["scores"][name] for name in columns}
    ours = {name: scores["scores"][name] for name in columns}
    gaps = {name: None if ours[name] is None else ours[name] - printed[name] for name in columns}
    table = [
        (published.row, [f"{value:.3f}" for value in printed.values()]),
        ("ours", ["-" if value is None else f"{value:.3f}" for value in ours.values()]),
        ("difference", ["-" if value is None else f"{value:+.3f}" for value in gaps.values()]),
    ]
    logger.info("\n" + format_table(columns, table))
    if row["difference"]:
        logger.info(shown(row["difference"]))
        return True
    gap = gaps["CIDEr-D"]
    if gap is None or abs(gap) > TOLERANCE:
        logger.warning(f"CIDEr-D differs from the printed score by more than {TOLERANCE}")
        return False
    return True
