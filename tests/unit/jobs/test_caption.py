"""`raycap caption`: which files are meant, captions from a bundle alone, work that continues, heat maps."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raycap.jobs.caption import caption
from raycap.jobs.caption_output import Parts
from raycap.jobs.cli import main
from raycap.pipeline.data.image_sources import find_images
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.storage.path import StoragePath, storage_path
from raycap.pipeline.storage.s3 import StorageError
from tests.support.bundles import make_bundle, with_confidence, without_digests, write_images


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small")


def test_captions_of_a_batch_are_those_of_each_image_alone(bundle: Path, tmp_path: Path) -> None:
    names = write_images(tmp_path, 5)
    with pytest.raises(ValueError, match="precision is 'bf16'; expected float32, bfloat16"):
        CaptionService(load_bundle(bundle), precision="bf16")
    service = CaptionService(load_bundle(bundle), beam_size=3, max_length=9)
    pixels = [service.pixels(Path(name).read_bytes()) for name in names]
    search = service.changed_search({}, num_results=3)
    together = service.caption(torch.stack(pixels), search)
    assert len({found.caption for found in together}) > 1, "all captions are the same: nothing would be seen"
    for one, found in zip(pixels, together, strict=True):
        (alone,) = service.caption(one[None], search)
        assert [each.caption for each in alone.n_best] == [each.caption for each in found.n_best]
        assert len(found.n_best) == 3 and alone.tokens == tuple((found.caption or "").split())
        values = [each.log_prob for each in found.n_best]
        assert [each.log_prob for each in alone.n_best] == pytest.approx(values, abs=1e-4)


def test_captions_in_bfloat16(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, out = write_images(tmp_path, 4), tmp_path / "captions.jsonl"
    log_probs = []
    for precision in ("float32", "bfloat16"):
        assert main(["caption", *names, "--model", str(bundle), "--json", "--precision", precision]) == 0
        log_probs.append([json.loads(line)["log_prob"] for line in capsys.readouterr().out.splitlines()])
    assert log_probs[0] != log_probs[1], "autocast was not on"
    assert log_probs[0] == pytest.approx(log_probs[1], abs=0.05)
    assert caption(names[:2], str(bundle), out=str(out), precision="bfloat16") == 0
    with pytest.raises(UserError, match="'precision': 'bfloat16'"):
        caption(names, str(bundle), out=str(out))


def test_lines_say_captions_and_errors_and_the_exit_code_is_one(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = write_images(tmp_path, 2)
    broken = tmp_path / "1b.png"
    broken.write_bytes(Path(names[0]).read_bytes()[:60])
    code = main(["caption", str(tmp_path), "--model", str(bundle), "--json", "--n-best", "2"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 1 and [row["image"] for row in rows] == [names[0], names[1], str(broken)]
    assert "error" in rows[2] and "caption" not in rows[2]
    for row in rows[:2]:
        assert row["caption"] == row["n_best"][0]["caption"] and row["log_prob"] < 0 and len(row["n_best"]) == 2
    assert main(["caption", names[0], "--model", str(bundle)]) == 0
    assert capsys.readouterr().out == f"{names[0]}: {rows[0]['caption']}\n"


def test_names_of_files_cannot_control_the_terminal(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They neither clear the screen nor forge a line. The JSON lines have the exact names."""
    names = ["a\x1b[2J\x1b]0;owned\x07.png", "forged.png: a caption\nc.png: text.png", "b\x9b2J\x7f\u202e.png"]
    (source,) = write_images(tmp_path / "source", 1)
    paths = [shutil.copyfile(source, tmp_path / name) for name in names[:2]]
    paths.append(tmp_path / names[2])
    paths[2].write_bytes(b"no image")
    assert main(["caption", *map(str, paths), "--model", str(bundle)]) == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3 and printed.out.replace("\n", "").isprintable()
    assert r"a\x1b[2J\x1b]0;owned\x07.png: " in printed.out and r"caption\nc.png: text.png: " in printed.out
    assert main(["caption", *map(str, paths), "--model", str(bundle), "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(map(str.isprintable, lines))
    assert [json.loads(line)["image"] for line in lines] == list(map(str, paths))


def test_a_killed_job_continues_and_another_model_is_refused(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, out = write_images(tmp_path / "images", 4), tmp_path / "captions.jsonl"
    assert caption(names, str(bundle), out=str(out)) == 0
    whole = out.read_text()
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:20])  # killed in the middle of the third line
    assert caption(names, str(bundle), out=str(out)) == 0
    assert out.read_text() == whole and "2 of 4 images are in" in capsys.readouterr().err
    for changes in ({"beam_size": 2}, {"num_results": 2}):
        with pytest.raises(UserError, match="was written with"):
            caption(names, str(bundle), out=str(out), **changes)  # type: ignore[arg-type]
    other = tmp_path / "small"  # of the same name, with other weights
    shutil.copytree(bundle, other)
    weights = load_file(without_digests(other) / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors")
    with pytest.raises(UserError, match="was written with"):
        caption(names, str(other), out=str(out))
    out.write_text(json.dumps({"image": names[0], "caption": "a", "beam_size": 5}) + "\n")  # an earlier version's
    with pytest.raises(UserError, match="was written with"):
        caption(names, str(bundle), out=str(out))
    out.write_text('{"other": 1}\n')
    with pytest.raises(UserError, match="line 1 is not a caption of this"):
        caption(names, str(bundle), out=str(out))


@pytest.mark.parametrize("text", ["my notes", '{"imag', '{"image": "a.png", "capt', "[]\n", '{"caption": "a cat"}'])
def test_a_file_of_something_else_is_not_emptied(
    bundle: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a half line of this command is removed, which a killed job has left."""
    out, is_own = tmp_path / "notes.txt", '{"image": '.startswith(text[:10])
    out.write_text(text)
    words = ["caption", *write_images(tmp_path, 1), "--model", str(bundle), "--out", str(out)]
    assert main(words) == (0 if is_own else 2)
    assert is_own or (out.read_text() == text and "give another name" in capsys.readouterr().err)


def test_an_output_on_s3_is_written_in_parts_and_continued(
    bundle: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before the third part; the second call captions only the images that no part has."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3)
    monkeypatch.setattr("raycap.jobs.caption_output.PART_ROWS", 2)
    monkeypatch.setattr("raycap.jobs.caption_output.PART_S", 1e9)
    place = storage_path(f"s3://data/{tmp_path.name}/captions")
    local, names = tmp_path / "captions.jsonl", write_images(tmp_path / "images", 7)
    assert caption(names, str(bundle), out=str(local)) == 0
    with monkeypatch.context() as killed:
        killed.setattr("raycap.jobs.caption_output.Parts.flush", flush_twice())
        assert caption(names, str(bundle), out=place.uri) == 0
    assert sorted(place.list()) == ["part-000001.jsonl", "part-000002.jsonl"]
    capsys.readouterr()
    assert caption(names, str(bundle), out=place.uri) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"4 of 7 images are in {place} already"
    assert re.fullmatch(rf"captions: {place} \(3 images in \d+ s, [\d.]+ images/s\)", said[-1])
    parts = "".join((place / name).read_bytes().decode() for name in sorted(place.list()))
    for line, expected in zip(
        map(json.loads, parts.splitlines()), map(json.loads, local.read_text().splitlines()), strict=True
    ):
        # The sum depends on the size of the batch, in the last digits on some processors.
        assert line.pop("log_prob") == pytest.approx(expected.pop("log_prob"), abs=1e-5)
        assert line == expected
    with pytest.raises(UserError, match="part-000001.jsonl: line 1 was written with"):
        caption(names, str(bundle), out=place.uri, beam_size=2)


def test_images_of_a_folder_are_those_behind_links_and_not_hidden(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("images")
    images = [Path(name) for name in (*write_images(folder / "b", 1), *write_images(tmp_path / "other" / "deep", 1))]
    for name in ("._a.jpg", ".ipynb_checkpoints/a-checkpoint.jpg", "b/.thumbs/a.jpg", "notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no image")
    links = {"images/more": "../other", "images/b/up": "..", "images/again": "b"}
    for link, target in links.items():
        Path(link).symlink_to(target)
    expected = [str(images[0]), str(folder / "more" / "deep" / images[1].name)]
    assert main(["caption", "images", "--model", str(bundle), "--json"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["image"] for line in printed.out.splitlines()] == expected
    (said,) = printed.err.splitlines()
    for words in ("3 hidden files", "1 files without the ending of an image", "2 links to folders"):
        assert words in said
    assert find_images(["images/", "images/b/*.png", "*/notes.txt"]) == [*expected, "images/notes.txt"]
    capsys.readouterr()
    assert main(["caption", *expected, "--model", str(bundle), "--json"]) == 0
    assert not capsys.readouterr().err


def test_a_failure_of_the_storage_is_no_error_of_an_image(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure ends the command. The next call captions the remaining images, including those that had failed."""
    names, out = write_images(tmp_path / "images", 4), tmp_path / "captions.jsonl"
    read_bytes, monkeypatched = StoragePath.read_bytes, monkeypatch.context()

    def failing(path: StoragePath, max_bytes: int | None = None) -> bytes:
        if path.name == Path(names[2]).name:
            raise StorageError("storage failed: 403")
        return read_bytes(path, max_bytes)

    monkeypatch.setattr("raycap.pipeline.evaluation.captioning.service.BATCH_SIZE", 2)
    with monkeypatched as failure:
        failure.setattr(StoragePath, "read_bytes", failing)
        with pytest.raises(StorageError):
            caption(names, str(bundle), out=str(out))
    assert len(out.read_text().splitlines()) == 2
    assert caption(names, str(bundle), out=str(out)) == 0
    assert [json.loads(line)["image"] for line in out.read_text().splitlines()] == names


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a confidence."""
    return with_confidence(make_bundle(tmp_path_factory.mktemp("judging") / "small"))


def test_captions_have_the_confidence_of_their_search(
    bundle: Path, judging: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = write_images(tmp_path, 6)
    assert main(["caption", *names, "--model", str(judging), "--json", "--n-best", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({row["confidence"] for row in rows}) > 1 and all(len(row["n_best"]) == 2 for row in rows)
    loaded = load_bundle(judging)
    (fit,), service = loaded.confidences, CaptionService(loaded)
    pixels = torch.stack([service.pixels(Path(name).read_bytes()) for name in names])
    with torch.no_grad():
        found, _ = service._search(pixels, service.search)
    for row, log_probs, length in zip(rows, found.log_probs[:, 0], found.lengths[:, 0], strict=True):
        mean = (float(log_probs.sum() / length) - fit.mean[0]) / fit.scale[0]
        assert row["confidence"] == pytest.approx(1 / (1 + np.exp(-fit.log_odds.weights[0] * mean)), abs=1e-3)
        assert row["expected_ciderd"] == pytest.approx(max(0, 1 + 0.3 * mean), abs=1e-3)
    assert main(["caption", names[0], "--model", str(judging)]) == 0
    assert f"  (confidence {rows[0]['confidence']:.2f})" in capsys.readouterr().out
    assert main(["caption", names[0], "--model", str(judging), "--json", "--beam", "2"]) == 0
    printed = capsys.readouterr()
    assert "confidence" not in json.loads(printed.out)
    assert printed.err.count("the model has no confidence in captions of this search, only of") == 1
    assert main(["caption", names[0], "--model", str(bundle), "--json"]) == 0
    printed = capsys.readouterr()
    assert "confidence" not in printed.out + printed.err, "an older bundle"


def flush_twice() -> Callable[[Parts], None]:
    """`Parts.flush` that does nothing from its third call on, as after a kill."""
    flush, calls = Parts.flush, list[Parts]()

    def flush_or_not(parts: Parts) -> None:
        calls.append(parts)
        if len(calls) <= 2:
            flush(parts)

    return flush_or_not


def test_explain_writes_a_picture_an_image(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = write_images(tmp_path / "images", 2)
    assert (
        caption(names, str(bundle), explain=tmp_path / "maps", json_lines=True, set_=["evaluation.max_length=5"]) == 0
    )
    pictures = sorted((tmp_path / "maps").iterdir())
    assert [path.name for path in pictures] == ["0000-0.png", "0001-1.png"]
    assert f"heat maps: {tmp_path / 'maps'}" in capsys.readouterr().err
