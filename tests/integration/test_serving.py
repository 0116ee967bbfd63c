"""The registered model without raycap: it needs only the modules stored with it and the packages of its metadata."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.runs.delivery import bundle_run
from raycap.pipeline.tracking.mlflow_client import tracking_client, tracking_uri
from raycap.pipeline.tracking.pyfunc import MAX_ROWS, PyfuncModel
from raycap.pipeline.tracking.run_tracker import register_model, sync
from tests.support.runs import prepare_run

# The environment of the test has packages that a served model does not require.
BLOCKED = ("ray", "boto3", "botocore", "h5py", "optuna", "psutil", "raycap.jobs", "tests")


@dataclass
class Registered:
    uri: str  # of the tracker
    images: list[Path]
    expected: list[dict[str, Any]]
    model: PyfuncModel


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Registered:
    """A model of a run that has not trained yet, registered in a database of its own."""
    folder, _ = prepare_run(tmp_path_factory.mktemp("served"), tracking={"enabled": True})
    bundle = bundle_run(folder)
    client = tracking_client(folder.config)
    sync(folder, client)
    assert register_model(folder, bundle, {"test_CIDEr-D": 0.5}, client) == "demo/1"
    assert register_model(folder, bundle, {"test_CIDEr-D": 0.5}, client) == "demo/1", "once a run"
    images = [Path(uri) for uri in folder.dataset.column("uri")[:2]]
    model = PyfuncModel(CaptionService(load_bundle(bundle), beam_size=2, max_length=12))
    expected = model.predict({"image": [path.read_bytes() for path in images]})
    return Registered(tracking_uri(folder.config), images, expected, model)


def same(captions: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["caption"] for row in captions] == [row["caption"] for row in expected]
    for one, other in zip(captions, expected, strict=True):
        assert one["log_prob"] == pytest.approx(other["log_prob"], abs=1e-4)


CLEAN = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{each}.") for each in BLOCKED):
            raise ImportError(f"{name} is not in this environment")

BLOCKED = json.loads(sys.argv[3])
sys.meta_path.insert(0, Blocked())
import mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
images = json.loads(sys.argv[2])
model = mlflow.pyfunc.load_model("models:/demo/1")
import raycap.pipeline.evaluation.captioning.service, raycap.pipeline.tracking.pyfunc
files = [open(path, "rb").read() for path in images]
print(json.dumps({
    "code": raycap.pipeline.evaluation.captioning.service.__file__,
    "requirements": open(mlflow.pyfunc.get_model_dependencies("models:/demo/1")).read().split(),
    "bytes": model.predict(pandas.DataFrame({"image": files})),
}))
"""


def test_the_model_captions_in_a_process_without_raycap(registered: Registered, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    images = json.dumps([str(path) for path in registered.images])
    done = subprocess.run(
        [sys.executable, "-c", CLEAN, registered.uri, images, json.dumps(BLOCKED)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert "/code/raycap/pipeline/evaluation/captioning/service.py" in answer["code"], (
        "the model's own code, not an installed raycap"
    )
    same(answer["bytes"], registered.expected)
    names = {line.partition("==")[0] for line in answer["requirements"]}
    assert names == {"mlflow", "numpy", "pillow", "pydantic", "pyyaml", "safetensors", "timm", "torch", "torchvision"}


def loaded(registered: Registered, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """The registered model as `mlflow models serve` loads it, with settings from the server's environment."""
    import mlflow

    monkeypatch.setenv("MLFLOW_PYFUNC_INFERENCE_CONFIG", json.dumps(settings))
    mlflow.set_tracking_uri(registered.uri)
    try:
        return mlflow.pyfunc.load_model("models:/demo/1")
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


def test_scoring_requests_give_the_captions_of_the_service(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON of a scoring request has base64 in `image`."""
    from mlflow.pyfunc.scoring_server import invocations

    model = loaded(registered, monkeypatch, beam_size=2)
    coded = [base64.b64encode(path.read_bytes()).decode() for path in registered.images]
    schema = model.metadata.get_input_schema()
    for body in (
        {"dataframe_split": {"columns": ["image"], "data": [[text] for text in coded]}},
        {"dataframe_records": [{"image": text} for text in coded]},
    ):
        answer = invocations(json.dumps(body), "application/json", model, schema)
        assert answer.status == 200
        same(json.loads(answer.response)["predictions"], registered.expected)


def test_base64_in_any_form_gives_the_caption(registered: Registered) -> None:
    """The bytes after the image need the last characters of the alphabet, and padding."""
    data = registered.images[0].read_bytes() + 3 * b"\xfb\xff\xfe"
    data += bytes((1 - len(data)) % 3)
    plain, lines = base64.b64encode(data).decode(), base64.encodebytes(data).decode()
    url_safe = base64.urlsafe_b64encode(data).decode()
    assert plain != url_safe and plain.endswith("=")
    forms = [plain, lines, lines.replace("\n", "\r\n"), url_safe, plain.rstrip("="), url_safe.rstrip("=")]
    forms += [f"data:image/png;base64,{plain}", f" data:image/png;name=a.png;base64,{lines}"]
    found = registered.model.predict({"image": [data, *forms]})
    assert {row["caption"] for row in found} == {found[0]["caption"]}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"image": [b"no image"]}, "row 0"),
        ({"image": ["no base64!"]}, "row 0: image is the text 'no base64!', which is no base64 of a file"),
        ({"image": ["photos/a.jpg"]}, "row 0: image is the text 'photos/a.jpg'"),
        ({"image": ["data:image/png,%89PNG"]}, "row 0: image is the text 'data:image/png,%89PNG'"),
        ({"image": ["abcde"]}, "row 0: image is the text 'abcde'"),
        ({"image": [""]}, "row 0: empty file"),
        ({"image": [float("nan")]}, "row 0: image is a float"),
        ({"uri": ["/etc/passwd"]}, "needs a column image"),
        ({"image": [b""] * (MAX_ROWS + 1)}, f"at most {MAX_ROWS}"),
    ],
)
def test_an_invalid_request_is_named(registered: Registered, table: Any, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        registered.model.predict(table)
    assert "\n" not in str(caught.value)


def test_images_above_the_limit_are_refused(registered: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="row 0: image is larger than 33554432 bytes"):
        registered.model.predict({"image": [bytes(2**25 + 1)]})
    size = registered.images[0].stat().st_size
    for limit in ("tracking.pyfunc.MAX_IMAGE_BYTES", "data.images.MAX_BYTES"):
        monkeypatch.setattr(f"raycap.pipeline.{limit}", size - 1)
    data = registered.images[0].read_bytes()
    for image in (data, base64.b64encode(data + bytes(4)).decode()):
        with pytest.raises(ValueError, match=f"row 0: image is larger than {size - 1} bytes"):
            registered.model.predict({"image": [image]})
