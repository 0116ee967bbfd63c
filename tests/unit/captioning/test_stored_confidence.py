"""A confidence in a bundle: how it is added, what belongs to it, and when an evaluation fits one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from raycap.jobs.evaluation import Evaluation
from raycap.models.config import Decoding
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, read_confidences, store_confidence
from raycap.pipeline.evaluation.captioning.bundle_files import fetched
from raycap.pipeline.evaluation.comparison.protocol import confidence_search
from raycap.pipeline.evaluation.scores.metrics import Score, Scores
from raycap.pipeline.evaluation.scores.split_result import SplitResult
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import storage_path
from tests.conftest import small_config
from tests.support.bundles import make_bundle, with_confidence, without_digests
from tests.support.confidence import make_confidence


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle") / "small", backbone=False)


@pytest.fixture
def bundle(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "bundle"))


def test_a_stored_confidence_belongs_to_the_bundle_and_replaces_that_of_its_search(bundle: Path) -> None:
    (bundle / "notes.txt").write_text("of the user")
    for search, bias in (("a", 0.0), ("b", 0.0), ("a", 1.0)):
        store_confidence(storage_path(bundle), make_confidence(search, bias))
    assert [(fit.search, fit.log_odds.bias) for fit in load_bundle(bundle).confidences] == [("b", 0.0), ("a", 1.0)]
    assert (bundle / "notes.txt").read_text() == "of the user"
    assert "confidence.json" in json.loads((bundle / "digests.json").read_text())["files"]
    content = (bundle / "confidence.json").read_bytes()
    (bundle / "confidence.json").write_bytes(content.replace(b"100", b"101"))
    with pytest.raises(UserError, match="confidence.json does not have the digest"):
        load_bundle(bundle)
    (bundle / "confidence.json").unlink()
    with pytest.raises(UserError, match=r"lacks confidence.json, which is in its digests.json"):
        load_bundle(bundle)


def test_new_digests_hide_no_damage(bundle: Path) -> None:
    (bundle / "card.md").write_text("changed")
    with pytest.raises(UserError, match=r"card.md does not have the digest"):
        store_confidence(storage_path(bundle), make_confidence())
    store_confidence(storage_path(without_digests(bundle)), make_confidence("a"))
    assert load_bundle(bundle).confidences == (make_confidence("a"),)


def test_links_in_a_strangers_bundle_are_not_followed(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (bundle / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"bundle/link.* is a link or a special file"):
        store_confidence(storage_path(bundle), make_confidence())
    assert (bundle / "link").is_symlink() and not (bundle / "confidence.json").exists()


def test_drawn_captions_have_the_confidence_of_as_many_draws() -> None:
    drawn = EvaluationSection(beam_size=1, decoding=Decoding(sampling=True))
    texts = [confidence_search(drawn.model_copy(update={"num_results": count}), 20) for count in (1, 5)]
    assert texts[0] != texts[1]
    beams = [confidence_search(EvaluationSection(num_results=count), 20) for count in (1, 5)]
    assert beams[0] == beams[1]


def test_a_signed_bundle_is_signed_again_or_not_changed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "private.pem").write_bytes(private)
    monkeypatch.setenv("RAYCAP_BUNDLE_SIGNING_KEY", str(tmp_path / "private.pem"))
    store_confidence(storage_path(bundle), make_confidence("a"))
    key.public_key().verify((bundle / "digests.sig").read_bytes(), (bundle / "digests.json").read_bytes())
    monkeypatch.delenv("RAYCAP_BUNDLE_SIGNING_KEY")
    with pytest.raises(UserError, match="has a signature, which a change would make invalid; set RAYCAP_BUNDLE_SIG"):
        store_confidence(storage_path(bundle), make_confidence("b"))
    assert load_bundle(bundle).confidences == (make_confidence("a"),)


def test_a_bundle_on_s3_gets_its_confidence_there(
    bundle: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3)
    place = storage_path(f"s3://data/{tmp_path.name}/bundle")
    Mirror(place, bundle).push()
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    store_confidence(place, make_confidence("a"))
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "other"))
    assert load_bundle(fetched(place)).confidences == (make_confidence("a"),)


def result(split: str, num_good: int, count: int = 60) -> SplitResult:
    """A scored split in which the good captions have the higher log-probabilities."""
    ciderd = [1.5 if image < num_good else 0.1 for image in range(count)]
    signals = {image: (score - 2, -3.0, 5.0, -1.0, 0.0, 0.0, 0.0, -0.5, -8.0) for image, score in enumerate(ciderd)}
    scores = Scores({"CIDEr-D": Score(1.0, per_image=ciderd)}, list(signals), "", {})
    return SplitResult(split, dict.fromkeys(signals, "a cat"), scores=scores, signals=signals)


def evaluation(folder: Path, *bundles: Path) -> Evaluation:
    made = Evaluation.__new__(Evaluation)
    made.config, made.bundles = parse_config(small_config(folder)), [*map(storage_path, bundles)]
    return made


def test_an_evaluation_fits_on_validation_and_judges_the_other_splits(
    bundle: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    job, val, test = evaluation(tmp_path, bundle), result("val", 30), result("test", 20)
    assert job._judge([test], Decorations()) == {}
    assert log_lines == ["confidence   none was fitted with this search; evaluate the validation split to fit it"]
    quality = job._judge([test, val], Decorations())
    assert quality.keys() == {"test"} and quality["test"].risks[-1].risk == pytest.approx(2 / 3)
    (fit,) = read_confidences(bundle)
    assert fit.good_ciderd == 0.85 and fit.num_images == 60
    assert job._judge([test], Decorations()) == quality, "the stored one"
    modified = (bundle / "confidence.json").stat().st_mtime_ns
    job._judge([val], Decorations())
    assert (bundle / "confidence.json").stat().st_mtime_ns == modified, "the same fit is not written again"
    evaluated = job.config.evaluation.model_copy(update={"beam_size": 3})
    job.config = job.config.model_copy(update={"evaluation": evaluated})
    assert job._judge([test], Decorations()) == {}
    assert job._judge([test, val], Decorations()).keys() == {"test"} and len(read_confidences(bundle)) == 2
    assert evaluation(tmp_path, bundle, bundle)._judge([test, val], Decorations()) == {}, "an ensemble"
    assert job._judge([result("val", 60)], Decorations()) == {} and len(read_confidences(bundle)) == 2


def test_bundles_that_must_not_change_are_judged_and_left_alone(
    bundle: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    champion = Path(shutil.copytree(bundle, tmp_path / "champion-t1"))
    signed = Path(shutil.copytree(bundle, tmp_path / "signed"))
    (signed / "digests.sig").write_bytes(b"x")
    for folder, words in ((champion, "a champion's bundle"), (signed, "has a signature")):
        log_lines.clear()
        quality = evaluation(tmp_path, folder)._judge([result("test", 20), result("val", 30)], Decorations())
        assert quality.keys() == {"test"} and read_confidences(folder) == ()
        assert "confidence   not stored: " in log_lines[0] and words in log_lines[0]


def test_a_bundle_of_an_older_version_has_no_confidence(bundle: Path) -> None:
    assert load_bundle(bundle).confidences == () and not (bundle / "confidence.json").exists()
    assert len(load_bundle(with_confidence(bundle)).confidences) == 1
