"""A champion that is followed, batches of unlike requests, addresses, and the models of a server."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import raycap
from raycap.jobs.serve.arguments import ServeArguments, named_models, server_token
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle
from raycap.pipeline.serving.address import parse_address, weights_digest
from raycap.pipeline.serving.host import ChampionWatcher, LoadedModel, ModelHost, load_source
from raycap.pipeline.serving.limits import RefusedError
from raycap.pipeline.serving.served_models import (
    Answer,
    Decoder,
    ImageFile,
    ImageJob,
    Made,
    Metrics,
    Search,
    ServedModel,
    transform_key,
)
from tests.support.bundles import make_bundle, with_confidence, write_images
from tests.support.serving import LocalCaptioners, crown, host_of


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [with_confidence(make_bundle(folder / str(seed), seed=seed)) for seed in range(2)]


def files_of(*names: str) -> list[ImageFile]:
    decoder = Decoder(10_000)
    return [ImageFile(name, Path(name).read_bytes(), decoder) for name in names]


def test_a_new_champion_takes_over_and_a_damaged_one_does_not(
    bundles: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = crown(tmp_path, "demo", bundles[0], 1)
    address = parse_address("champion:demo", str(tmp_path))

    def load(bundle: StoredBundle) -> LoadedModel:
        return load_source(bundle, weights_digest(bundle), {"device": "cpu"}, address)

    source = address.resolve()
    host = ModelHost(load(source))
    watcher = ChampionWatcher(address, host, source, load, 60)
    assert not watcher.look() and not watcher.has_failed
    second = crown(tmp_path, "demo", bundles[1], 2)
    assert watcher.look() and not watcher.look()
    assert host.current.digest == second.files["model.safetensors"][:16]
    damaged = crown(tmp_path, "demo", bundles[0], 3)
    weights = tmp_path / damaged.bundle / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for _ in range(3):
        assert not watcher.look() and watcher.has_failed
    assert host.current.digest == second.files["model.safetensors"][:16], "the old one stays"
    assert caplog.text.count("the current champion stays, because the new one failed") == 1, "said once"
    (tmp_path / "retrain/demo/champion.json").write_text("{")
    assert not watcher.look() and watcher.has_failed
    shutil.rmtree(tmp_path / "retrain")
    assert not watcher.look() and watcher.has_failed, "no champion at all"
    crown(tmp_path, "demo", bundles[0], 1)
    assert watcher.look() and not watcher.has_failed, "a rollback"
    assert host.current.digest == first.files["model.safetensors"][:16]


def test_requests_with_unlike_searches_share_a_batch_as_far_as_they_can(bundles: list[Path], tmp_path: Path) -> None:
    host, names = host_of(bundles[0]), write_images(tmp_path, 6)
    transform = host.current.service.transform
    pixels = [transform.resize(Image.open(name).convert("RGB")) for name in names]
    searches = [Search(), Search(beam_size=2), Search(), Search(num_results=3), Search(), Search(num_results=9)]
    key = transform_key(transform)
    answers = host.caption([ImageJob(*each) for each in zip(pixels, [key] * 6, searches, strict=True)])
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


def test_a_batch_that_needs_too_much_memory_is_divided(
    bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, names = host_of(bundles[0]), write_images(tmp_path, 5)
    service, caption, sizes = host.current.service, host.current.service.caption, list[int]()

    def limited(pixels: torch.Tensor, *arguments: Any) -> Any:
        sizes.append(len(pixels))
        if len(pixels) > most:
            raise torch.OutOfMemoryError
        return caption(pixels, *arguments)

    monkeypatch.setattr(service, "caption", limited)
    images = [service.transform.resize(Image.open(name).convert("RGB")) for name in names]
    jobs = [ImageJob(pixels, transform_key(service.transform)) for pixels in images]
    most = 2
    made = host.caption(jobs)
    expected = raycap.load(bundles[0], device="cpu").caption(names)
    assert [each.result.caption for each in made] == [each.caption for each in expected]  # type: ignore[union-attr]
    assert sizes == [5, 2, 3, 1, 2]
    most = 0
    refused = host.caption(jobs)
    assert [each.status for each in refused if isinstance(each, RefusedError)] == [500] * 5


def test_a_request_is_answered_by_one_model_also_while_it_is_replaced(bundles: list[Path], tmp_path: Path) -> None:
    """The model is replaced after the first image of the request; all images are captioned again."""
    old, new = host_of(bundles[0]), host_of(bundles[1])
    names = write_images(tmp_path, 3)

    class Replaced(LocalCaptioners):
        async def caption(self, jobs: list[ImageJob]) -> list[Answer]:
            self.num_jobs += len(jobs)
            if self.num_jobs > len(jobs):
                return new.caption(jobs)
            return [*old.caption(jobs[:1]), *new.caption(jobs[1:])]

    captioners = Replaced(old)
    model = ServedModel("main", captioners, Metrics())
    made = asyncio.run(model.caption(files_of(*names), Search()))
    assert {each.digest for each in made} == {new.current.digest} and captioners.num_jobs == 6
    expected = raycap.load(bundles[1], device="cpu").caption(names)
    assert [each.result.caption for each in made] == [each.caption for each in expected]


def test_the_models_of_a_server(bundles: list[Path], tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    crown(storage, "demo", bundles[1], 1)
    models = named_models(
        ServeArguments(
            models=(str(bundles[0]), f"b={bundles[1]}", "champion:demo"),
            storage=str(storage),
        ),
        send_local=False,
    )
    assert [model.name for model in models] == ["small", "b", "demo"]
    assert models[1].digest == models[2].digest != models[0].digest
    assert models[0].source.digests, "a bundle that is replaced later is not loaded by a restarted process"
    features = make_bundle(tmp_path / "features", backbone=False)
    for names, words in (
        ((str(bundles[0]), str(bundles[1])), "--model: two models have the name small; give names"),
        ((f"a/b={bundles[0]}",), f"--model a/b={bundles[0]}: no such folder"),
        (("champion:nobody",), "--model .* has no champion of nobody"),
        (("champion:../x",), "names no configuration"),
        ((str(tmp_path),), "--model .*model.safetensors|--model .*config.yaml"),
        ((str(features),), "this bundle has no backbone"),
    ):
        with pytest.raises(UserError, match=words):
            named_models(ServeArguments(models=names, storage=str(storage)), send_local=False)


def test_a_server_that_others_can_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYCAP_SERVE_TOKEN", raising=False)
    assert server_token("127.0.0.1", False) is None and server_token("0.0.0.0", True) is None
    for host, words in (
        ("0.0.0.0", "on 0.0.0.0"),
        ("example.org", "on example.org"),
        ("", "on "),
        (None, "in a cluster"),
    ):
        with pytest.raises(UserError, match=f"a server {words} can be reached by other machines and needs a token"):
            server_token(host, False)
    monkeypatch.setenv("RAYCAP_SERVE_TOKEN", "abcdefgh12345678")
    assert server_token("0.0.0.0", False) == "abcdefgh12345678"
    for token in ("", "short", "with blanks in the token", "ümläute-are-not-ascii", "a\nb" * 10):
        monkeypatch.setenv("RAYCAP_SERVE_TOKEN", token)
        with pytest.raises(UserError, match="must have 16 or more visible ASCII characters"):
            server_token("127.0.0.1", False)
