"""`raycap export`: writes a captioner as graphs that run without raycap."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.named_files import check_output_folder, open_bundle
from raycap.pipeline.errors import UserError

REMEDY = "install raycap with the extra `export`, as docs/python.md describes"
logger = logging.getLogger(__name__)


def export(
    model: Annotated[str, typer.Argument(metavar="BUNDLE", help="A model bundle, local or on S3.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the result.")],
) -> None:
    """Write a captioner as ONNX graphs that run without raycap.

    The folder contains an encoder, one step of the decoder, and what a program needs to caption images with them, such
    as raycap_onnx. The graphs are compared with the model on random inputs.

    Example: raycap export results/models/demo/demo-1234567890 -o captioner
    """
    from raycap.pipeline.serving.export import export_captioner

    for package in ("onnx", "onnxruntime", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"`raycap export` needs the package {package}, which is not installed; {REMEDY}")
    check_output_folder("--out", out, must_be_empty=True)
    bundle = open_bundle("BUNDLE", model).bundle
    logger.info(f"exporting {model}")
    if bundle.search.decoding.sampling or bundle.search.decoding.beam_groups > 1:
        logger.warning("the model's search draws captions or has groups of beams, which raycap_onnx refuses")
    difference = export_captioner(bundle, out)
    print(f"the graphs differ from the model by up to {difference:.1e}")
    print(f"The captioner: {out}")
