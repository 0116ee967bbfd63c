"""Registers a run's bundle in MLflow's model registry, as a pyfunc model that contains the code it needs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.runs.folder import RunFolder
from raycap.pipeline.storage.s3 import is_remote
from raycap.pipeline.tracking.mlflow_client import tracking_client, tracking_uri
from raycap.pipeline.tracking.run_sync import SentRecord
from raycap.pipeline.version import package_folder

SERVING_PACKAGES = ("mlflow", "numpy", "pillow", "pydantic", "pyyaml", "safetensors", "timm", "torch", "torchvision")
TOKENIZER_PACKAGES = {"unicode": ("regex",), "characters": ("regex",), "subword": ("regex", "tokenizers")}


def register_model(folder: RunFolder, config: RunConfig, bundle: Path, scores: dict[str, float]) -> str:
    """Logs the bundle as a pyfunc model of the parent run and registers it with its scores; returns name/version.

    A version that this run registered before is returned unchanged.
    """
    parent = SentRecord(folder, config).values["parent"]
    registered = tracking_client(config).search_model_versions(f"run_id = '{parent}'")
    if registered:
        return f"{registered[0].name}/{registered[0].version}"
    import mlflow

    name = config.tracking.registered_name or config.name
    tokenizer_packages = TOKENIZER_PACKAGES.get(config.data.tokenizer, ())
    packages = [*SERVING_PACKAGES, *tokenizer_packages, *(["boto3"] if is_remote(config.storage.uri) else [])]
    versions = {package: importlib.metadata.version(package) for package in packages}
    # MLflow reports success on stderr and warns about the input example, which a bundle does not need.
    with (
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(action="ignore"),
        _serving_code() as code,
        _current_run(config, parent),
    ):
        logged = mlflow.pyfunc.log_model(
            name="model",
            loader_module="raycap.pipeline.tracking.pyfunc",  # the module reads the bundle, so nothing is pickled
            data_path=str(bundle),
            code_paths=code,
            # package indexes name versions without a build's suffix (+cpu)
            pip_requirements=[f"{package}=={version.partition('+')[0]}" for package, version in versions.items()],
            signature=_signature(),
            input_example=_example(),
            model_config=_settings(config),
        )
        tags = {metric: f"{score:.4f}" for metric, score in scores.items()}
        version = mlflow.register_model(logged.model_uri, name, tags=tags)
    return f"{name}/{version.version}"


@contextlib.contextmanager
def _current_run(config: RunConfig, run_id: str) -> Iterator[None]:
    """Makes a run MLflow's current run. Afterwards the environment has no address, which may contain a password."""
    import mlflow

    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(tracking_uri(config))
    try:
        with mlflow.start_run(run_id=run_id):
            yield
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None unsets it


@contextlib.contextmanager
def _serving_code() -> Iterator[list[str]]:
    """Yields folders with copies of the part of raycap that serving needs, which are stored with a model."""
    from raycap.pipeline.tracking.pyfunc import serving_sources

    with tempfile.TemporaryDirectory() as temporary:
        for source in serving_sources():
            target = Path(temporary) / source.relative_to(package_folder().parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        yield [str(folder) for folder in sorted(Path(temporary).iterdir())]


def _settings(config: RunConfig) -> dict[str, Any]:
    """The settings of the pyfunc model. MLflow lets a server change those that are named here."""
    search = {key: getattr(config.evaluation, key) for key in ("beam_size", "max_length", "precision")}
    return search | {"uri_roots": []}


def _signature() -> Any:
    """The served model's input, an image's bytes or URI, and its output, a caption with its values."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    inputs: list[Any] = [ColSpec("binary", "image", required=False), ColSpec("string", "uri", required=False)]
    outputs: list[Any] = [ColSpec("string", "caption"), ColSpec("double", "log_prob")]
    outputs += [ColSpec("double", name, required=False) for name in ("confidence", "expected_ciderd")]
    return ModelSignature(Schema(inputs), Schema(outputs))


def _example() -> Any:
    """The bytes of a small PNG file in the column `image`."""
    import pandas
    from PIL import Image

    file = io.BytesIO()
    Image.linear_gradient("L").resize((32, 32)).save(file, "PNG")
    return pandas.DataFrame({"image": [file.getvalue()]})
