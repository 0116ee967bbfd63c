"""A champion that is followed, batches of unlike requests, addresses, and the models of a server."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from PIL import Image

import raycap
from raycap.jobs.cli import main
from raycap.pipeline.errors import UserError
from raycap.pipeline.serving.address import ModelAddress, ServeArguments, named_models, server_token
from raycap.pipeline.serving.app import Metrics, ServedModels
from raycap.pipeline.serving.host import (
    Answer,
    ImageJob,
    Made,
    ModelHost,
    RefusedError,
    Search,
)
from raycap.pipeline.storage.path import storage_path
from tests.support.bundles import make_bundle, with_confidence, write_images
from tests.support.serving import LocalCaptioners, crown, host_of


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [with_confidence(make_bundle(folder / str(seed), seed=seed)) for seed in range(2)]


def files_of(*names: str) -> list[BinaryIO]:
    return [Path(name).open("rb") for name in names]


def test_a_new_champion_takes_over_and_a_damaged_one_does_not(
    bundles: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = crown(tmp_path, "demo", bundles[0], 1)
    address = ModelAddress("champion:demo", storage_path(str(tmp_path)))
    host = ModelHost(address, address.resolve(), {"device": "cpu"})
    assert not host.look() and not host.failure
    second = crown(tmp_path, "demo", bundles[1], 2)
    assert host.look() and not host.look()
    assert host.current.info.digest == second.files["model.safetensors"][:16]
    damaged = crown(tmp_path, "demo", bundles[0], 3)
    weights = tmp_path / damaged.bundle / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for _ in range(3):
        assert not host.look() and host.failure
    assert host.current.info.digest == second.files["model.safetensors"][:16], "the old one stays"
    assert caplog.text.count("the current champion stays, because the new one failed") == 1, "said once"
    (tmp_path / "retrain/demo/champion.json").write_text("{")
    assert not host.look() and host.failure
    shutil.rmtree(tmp_path / "retrain")
    assert not host.look() and host.failure, "no champion at all"
    crown(tmp_path, "demo", bundles[0], 1)
    assert host.look() and not host.failure, "a rollback"
    assert host.current.info.digest == first.files["model.safetensors"][:16]


def test_requests_with_unlike_searches_share_a_batch_as_far_as_they_can(bundles: list[Path], tmp_path: Path) -> None:
    host, names = host_of(bundles[0]), write_images(tmp_path, 6)
    transform = host.current.service.transform
    pixels = [transform.resize(Image.open(name).convert("RGB")) for name in names]
    searches = [Search(), Search(beam_size=2), Search(), Search(num_results=3), Search(), Search(num_results=9)]
    answers = host.caption([ImageJob(each, transform, search) for each, search in zip(pixels, searches, strict=True)])
    captioner = raycap.load(bundles[0], device="cpu")
    sizes = []
    for name, search, answer in zip(names[:5], searches, answers, strict=False):
        assert isinstance(answer, Made)
        sizes.append((answer.batch_size, answer.batch_index))
        (expected,) = captioner.caption([name], beam_size=search.beam_size, num_results=search.num_results)
        assert isinstance(answer.result, raycap.ImageCaption)
        assert [each.caption for each in answer.result.n_best] == [each.caption for each in expected.n_best]
    assert sizes == [(3, 0), (1, 0), (3, 1), (1, 0), (3, 2)]
    assert isinstance(answers[5], RefusedError) and answers[5].status == 422, "only this request is refused"


def test_a_batch_that_fails_refuses_its_images_only(bundles: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(bundles[0])
    service, caption = host.current.service, host.current.service.caption

    def limited(pixels: torch.Tensor, *arguments: Any) -> Any:
        if len(pixels) > 1:
            raise torch.OutOfMemoryError
        return caption(pixels, *arguments)

    monkeypatch.setattr(service, "caption", limited)
    pixels = np.zeros((32, 32, 3), np.uint8)
    jobs = [ImageJob(pixels, service.transform, Search(beam_size=size)) for size in (2, 2, 3)]
    first, second, third = host.caption(jobs)
    assert isinstance(first, RefusedError) and first == second and (first.status, first.retry_after_s) == (503, 1)
    assert isinstance(third, Made)


def test_images_are_resized_again_for_a_model_with_another_transform(bundles: list[Path], tmp_path: Path) -> None:
    host, (name,) = host_of(bundles[0]), write_images(tmp_path, 1)
    transform = host.current.service.transform
    small = type(transform)(image_size=16)
    assert host.caption([ImageJob(np.zeros((16, 16, 3), np.uint8), small)]) == [None]
    models = ServedModels({"main": LocalCaptioners(host)}, Metrics(), 10_000)
    models._transforms["main"] = small  # of the model before
    (made,) = asyncio.run(models.caption("main", files_of(name), Search()))
    assert isinstance(made.result, raycap.ImageCaption)
    assert made.result.caption == raycap.load(bundles[0], device="cpu").caption([name])[0].caption


def test_a_request_is_answered_by_one_model_also_while_it_is_replaced(bundles: list[Path], tmp_path: Path) -> None:
    """The model is replaced after the first image of the request; all images are captioned again."""
    old, new = host_of(bundles[0]), host_of(bundles[1])
    names, calls = write_images(tmp_path, 3), list[int]()

    async def replaced(method: str, *arguments: Any) -> Any:
        if method == "describe":
            return asdict(old.current.info), old.current.service.transform
        jobs: list[ImageJob] = arguments[0]
        calls.append(len(jobs))
        answers: list[Answer] = new.caption(jobs)
        return answers if len(calls) > 1 else [*old.caption(jobs[:1]), *answers[1:]]

    models = ServedModels({"main": replaced}, Metrics(), 10_000)
    made = asyncio.run(models.caption("main", files_of(*names), Search()))
    assert {each.info.digest for each in made} == {new.current.info.digest} and calls == [3, 3]
    expected = raycap.load(bundles[1], device="cpu").caption(names)
    assert [each.result.caption for each in made] == [each.caption for each in expected]  # type: ignore[union-attr]


def test_the_models_of_a_server(bundles: list[Path], tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    crown(storage, "demo", bundles[1], 1)
    models = named_models(
        ServeArguments(
            models=(str(bundles[0]), f"b={bundles[1]}", "champion:demo"),
            storage=str(storage),
        )
    )
    assert [model.name for model in models] == ["small", "b", "demo"]
    first, *others = [model.source.digests["model.safetensors"] for model in models]  # type: ignore[union-attr]
    assert first not in others and len(set(others)) == 1
    features = make_bundle(tmp_path / "features", backbone=False)
    for names, words in (
        ((str(bundles[0]), str(bundles[1])), "--model: two models have the name small; give names"),
        ((f"a/b={bundles[0]}",), f"--model a/b={bundles[0]}: no such folder"),
        (("champion:../x",), "names no configuration"),
        ((str(tmp_path),), "--model .*model.safetensors|--model .*config.yaml"),
        ((str(features),), "this bundle has no backbone"),
    ):
        with pytest.raises(UserError, match=words):
            named_models(ServeArguments(models=names, storage=str(storage)))


def test_a_server_that_others_can_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYCAP_SERVE_TOKEN", raising=False)
    assert server_token("127.0.0.1", False) is None and server_token("0.0.0.0", True) is None
    for host, words in (("0.0.0.0", "on 0.0.0.0"), ("", "on "), ("a cluster", "on a cluster")):
        with pytest.raises(UserError, match=f"a server {words} can be reached by other machines and needs a token"):
            server_token(host, False)
    monkeypatch.setenv("RAYCAP_SERVE_TOKEN", "abcdefgh12345678")
    assert server_token("0.0.0.0", False) == "abcdefgh12345678"
    for token in ("short", "with blanks in the token", "ümläute-are-not-ascii", "a\nb" * 10):
        monkeypatch.setenv("RAYCAP_SERVE_TOKEN", token)
        with pytest.raises(UserError, match="must have 16 or more visible ASCII characters"):
            server_token("127.0.0.1", False)


def test_mistakes_are_said_before_ray_is_started(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAYCAP_SERVE_TOKEN", raising=False)
    importlib.import_module("raycap.jobs.serve.deployments")  # pytest shows the warnings of Ray Serve's first import
    monkeypatch.setattr("raycap.jobs.serve.command.connect", None)
    model = str(bundles[0])
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        for options, words in (
            (["--model", "nothing"], "--model nothing: no such folder"),
            (["--model", model, "--host", "0.0.0.0"], "needs a token in RAYCAP_SERVE_TOKEN"),
            (["--model", model, "--port", port], f"--port {port}: Address already in use"),
        ):
            assert main(["serve", *options]) == 2, options
            said = capsys.readouterr().err.splitlines()
            assert len(said) == 1 and words in said[0], (options, said)
