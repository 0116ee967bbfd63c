"""`raycap reproduce`: evaluates the published checkpoints on COCO and compares the scores with the published ones."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from raycap.jobs.evaluate import evaluate
from raycap.jobs.import_ import import_checkpoint
from raycap.jobs.named_files import check_output_folder
from raycap.jobs.options import Address
from raycap.models.config import Values
from raycap.pipeline.config.load import load_config
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.reports.tables import format_table
from raycap.pipeline.runtime.names import shown
from raycap.pipeline.storage.atomic import read_json
from raycap.pipeline.version import package_folder

logger = logging.getLogger(__name__)

EXPANSIONNET = "github.com/jchenghu/ExpansionNet_v2"
MESHED_MEMORY = "github.com/aimagelab/meshed-memory-transformer"
SPLITS, IMAGES, REGIONS = "dataset_coco.json", "val2014", "coco_detections.hdf5"
CONFIGS = package_folder() / "configs"
COCO = {SPLITS: f"Karpathy's splits, in the drive that the README of {EXPANSIONNET} links"}
OF_IMPORT = ("model.", "backbone.")  # prefixes of the keys that belong to the import
TOLERANCE = 0.005  # of CIDEr-D, because the papers print three digits and libraries decode images differently


@dataclass(frozen=True)
class Published:
    """A published model.

    row: the name of the published scores that the model should reproduce. path: the configuration's file. files: by
    each file's name, what it is and where it can be found.
    """

    title: str
    row: str
    path: Path
    checkpoint: str
    tokens: str
    files: Mapping[str, str]


PUBLISHED = {
    "expansionnet_v2": Published(
        "ExpansionNet v2",
        "ExpansionNet v2, SCST (paper)",
        CONFIGS / "expansionnet_v2_coco.yaml",
        "rf_model.pth",
        "demo_coco_tokens.pickle",
        {
            "rf_model.pth": f"the checkpoint, linked in the README of {EXPANSIONNET}",
            "demo_coco_tokens.pickle": f"its vocabulary, in demo_material/ of {EXPANSIONNET}",
            **COCO,
            IMAGES: "the folder of COCO's validation images COCO_val2014_*.jpg, from val2014.zip of cocodataset.org",
        },
    ),
    "meshed_memory": Published(
        "Meshed-Memory Transformer",
        "Meshed-Memory Transformer, SCST (paper)",
        CONFIGS / "meshed_memory_published_coco.yaml",
        "meshed_memory_transformer.pth",
        "vocab.pkl",
        {
            "meshed_memory_transformer.pth": f"the checkpoint, linked in the README of {MESHED_MEMORY}",
            "vocab.pkl": f"its vocabulary, in {MESHED_MEMORY}",
            **COCO,
            REGIONS: f"the region features, linked in the README of {MESHED_MEMORY}",
        },
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
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=value", help="Override a key of the import or of the evaluation."),
    ] = None,
    address: Address = None,
) -> int:
    """Compare published checkpoints with their papers' scores.

    It evaluates them on Karpathy's test split of COCO. It names missing files and where to download them. --set changes
    keys of the import, which begin with model. or backbone., and of the evaluation. The exit code is 1 when an image
    cannot be read, when CIDEr-D differs from the published score, and, unless --set was given, when the scores cannot
    be compared.

    Example: raycap reproduce /path/to/files --system expansionnet_v2
    """
    check_output_folder("--out", out)
    if not folder.is_dir():
        raise UserError(f"{shown(folder)} is not a folder; give the folder of the published files")
    systems = [name for name, each in PUBLISHED.items() if (folder / each.checkpoint).is_file()]
    if system is not None:
        systems = [system]
    if not systems:
        checkpoints = " or ".join(f"{each.checkpoint} ({each.files[each.checkpoint]})" for each in PUBLISHED.values())
        raise UserError(f"{shown(folder)} has no published checkpoint; put one of these files there: {checkpoints}")
    for name in systems:
        _require_files(folder, PUBLISHED[name])
        # A wrong override raises an error here, because the first import takes long.
        load_config(PUBLISHED[name].path, _evaluation_overrides(name, folder, out / name, set_ or ()))
    return max(_reproduce(name, folder, out / name, set_ or (), address) for name in systems)


def _require_files(folder: Path, published: Published) -> None:
    """Raises UserError if files are missing. The message names them, and where they can be found."""
    missing = []
    for name, what in published.files.items():
        pattern = f"{IMAGES}/COCO_val2014_*.jpg" if name == IMAGES else name
        if next(folder.glob(pattern), None) is None:
            missing.append(f"{name} ({what})")
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}; {published.title} needs all of its files in this folder")


def _reproduce(system: str, folder: Path, out: Path, overrides: Sequence[str], address: str | None) -> int:
    """Imports and evaluates one system. Returns the exit code."""
    published, bundle = PUBLISHED[system], out / "bundle"
    if (bundle / "config.yaml").is_file():  # an earlier call may have imported other files
        shutil.rmtree(bundle)
    import_checkpoint(
        system,  # type: ignore[arg-type]
        checkpoint=folder / published.checkpoint,
        tokens=folder / published.tokens,
        out=bundle,
        overrides=[override for override in overrides if override.startswith(OF_IMPORT)],
        objective="scst",
    )
    code = evaluate(
        published.path,
        _evaluation_overrides(system, folder, out, overrides),
        splits=["test"],
        models=[str(bundle)],
        out=str(out / "evaluation"),
        address=address,
    )
    scores = read_json(out / "evaluation" / "scores.json")["splits"]["test"]
    is_reproduced = _compare(published, scores, must_be_comparable=not overrides)
    logger.info(f"report       {out / 'evaluation' / 'report-test.html'}")
    return code or int(not is_reproduced)


def _evaluation_overrides(system: str, folder: Path, out: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides of the evaluation: files, output folder and GPU of this machine, and those that the user gave."""
    import torch

    num_gpus = min(1, torch.cuda.device_count())
    paths = {"data.root": folder, "storage": out / "storage"}
    values: Values = {"workers.num_workers": 1, "workers.cpus_per_worker": "null", "workers.threads_per_worker": "null"}
    values |= {"workers.gpus_per_worker": num_gpus, "features.gpus_per_actor": num_gpus}
    if REGIONS in PUBLISHED[system].files:
        paths["features.hdf5"] = folder / REGIONS
    else:  # the published captions were computed from pixels, so ours are, too
        values["features.store"] = "never"
    values |= {key: json.dumps(str(path.absolute())) for key, path in paths.items()}
    given = [override for override in overrides if not override.startswith(OF_IMPORT)]
    return [*(f"{key}={value}" for key, value in values.items()), *given]


def _compare(published: Published, scores: Values, *, must_be_comparable: bool) -> bool:
    """Prints our scores beside the published row. Returns False if CIDEr-D differs by more than TOLERANCE.

    scores: the entry of the split in scores.json. must_be_comparable: if it is True, scores that cannot be compared
    also give False. Raises JobFailedError if there are no scores.
    """
    if "scores" not in scores:
        raise JobFailedError("no image could be captioned, so that there are no scores; scores.json has the reasons")
    row = next(each for each in scores["published"] if each["name"] == published.row)
    theirs, ours = row["scores"], scores["scores"]
    columns = [name for name in theirs if name in ours]
    gaps = {name: None if ours[name] is None else ours[name] - theirs[name] for name in columns}
    table = [
        (published.row, [f"{theirs[name]:.3f}" for name in columns]),
        ("ours", ["-" if ours[name] is None else f"{ours[name]:.3f}" for name in columns]),
        ("difference", ["-" if gap is None else f"{gap:+.3f}" for gap in gaps.values()]),
    ]
    logger.info("\n" + format_table(columns, table))
    if row["difference"]:
        logger.warning(row["difference"])
        return not must_be_comparable
    gap = gaps["CIDEr-D"]
    if gap is None or abs(gap) > TOLERANCE:
        logger.warning(f"CIDEr-D differs from the published score by more than {TOLERANCE}")
        return False
    return True
