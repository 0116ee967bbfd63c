"""A run with everything on S3, tracked by MLflow's own server with PostgreSQL behind it and artifacts on S3."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from raycap.pipeline.storage.path import StoragePath
from raycap.pipeline.storage.s3 import StorageOptions
from tests.conftest import small_config
from tests.support.mlflow_server import mlflow_server
from tests.support.postgres import postgres
from tests.support.runs import run_with_own_cache
from tests.support.s3_server import s3_server


@pytest.mark.proof
@pytest.mark.ray
def test_a_run_tracked_in_postgres_with_artifacts_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg2")
    with s3_server() as s3, postgres() as database:
        monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3)
        with mlflow_server(tmp_path / "mlflow", database, "s3://data/mlflow") as server:
            settings = small_config({"uri": "s3://data/storage", "endpoint_url": s3})
            settings["tracking"] = {"enabled": True, "uri": server.url}
            config = tmp_path / "run.yaml"
            config.write_text(yaml.safe_dump(settings))
            output = run_with_own_cache(config, tmp_path / "cache")
            assert f"tracking     {server.url}, model demo/1" in output, output

            import mlflow

            client = mlflow.MlflowClient(server.url)
            experiment = client.get_experiment_by_name("raycap")
            runs = client.search_runs([experiment.experiment_id])
            assert len(runs) == 5 and {run.info.status for run in runs} == {"FINISHED"}
            for run in runs:
                if "mlflow.parentRunId" in run.data.tags:
                    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
                    assert steps and steps == list(range(1, len(steps) + 1))
            version = client.get_model_version("demo", "1")
            assert version.tags.keys() >= {"test_CIDEr-D"}
            mlflow.set_tracking_uri(server.url)  # a models:/ URI is looked up there, whatever else is named
            try:
                model = mlflow.artifacts.download_artifacts("models:/demo/1", dst_path=str(tmp_path / "model"))
            finally:
                mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
            requirements = (Path(model) / "requirements.txt").read_text()
            assert "boto3==" in requirements, "a model of a run on S3 reads s3:// URIs"
            there = StoragePath("s3://data/mlflow", StorageOptions(s3)).list()
            assert any(name.endswith("report.html") for name in there)
            assert any(name.endswith("model.safetensors") for name in there)
    assert os.environ.get("MLFLOW_TRACKING_URI") is None
