"""The protocol of a bundle: what writes it, what it decides, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from raycap.jobs.import_ import import_checkpoint
from raycap.models.config import PLAIN
from raycap.pipeline.config.load import parse_config
from raycap.pipeline.config.sections import EvaluationSection
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import bundle_protocol, load_bundle, read_bundle_config
from raycap.pipeline.evaluation.captioning.service import CaptionService
from raycap.pipeline.evaluation.comparison.protocol import (
    Protocol,
    differences,
    run_protocol,
    search_settings,
)
from tests.conftest import small_config
from tests.support.bundles import make_bundle, without_digests

GOLDEN = Path(__file__).resolve().parents[2] / "parity" / "golden" / "expansionnet_v2"


def test_a_run_records_how_it_was_trained_and_is_evaluated(tmp_path: Path) -> None:
    config = parse_config(small_config(tmp_path) | {"evaluation": {"beam_size": 3, "ranking": "sum"}})
    first, *_, last = config.stages
    assert last.objective == "scst"
    protocol = run_protocol(config, last)
    assert (protocol.objective, protocol.eos_in_reward, protocol.ranking, protocol.beam_size) == (
        "scst",
        True,
        "sum",
        3,
    )
    assert (protocol.system, protocol.features, protocol.attend_padding) == ("expansionnet_v2", "grid", False)
    without_eos = last.model_copy(update={"scst": last.sampling.model_copy(update={"eos_in_reward": False})})
    assert differences(protocol, run_protocol(config, without_eos)) == [("EOS in the reward", "no EOS in the reward")]
    assert differences(protocol, run_protocol(config, first)) == [("SCST", "cross entropy")]
    assert run_protocol(config, None).objective is None
    assert protocol.signature == (
        "expansionnet_v2, grid features, SCST, EOS in the reward, beam 3, at most 20 tokens, "
        "ranked by the sum of log-probabilities, no UNK, PTB tokens, document frequencies of the scored split"
    )


def test_given_settings_come_before_those_of_the_bundles() -> None:
    recorded = Protocol(beam_size=4, max_length=30, ranking="sum")
    assert search_settings(EvaluationSection(), [Protocol()]) == EvaluationSection(decoding=PLAIN)
    assert search_settings(EvaluationSection(), [recorded, Protocol()]) == EvaluationSection(
        beam_size=4, max_length=30, ranking="sum", decoding=PLAIN
    )
    given = EvaluationSection(max_length=9, ranking="mean", precision="bfloat16")
    assert search_settings(given, [recorded]) == given.model_copy(update={"beam_size": 4, "decoding": PLAIN})
    with pytest.raises(UserError, match=r"different ways: beam 4 and beam 5; set evaluation.beam_size$"):
        search_settings(EvaluationSection(), [recorded, Protocol(beam_size=5)])
    with pytest.raises(UserError, match="num_results = 3 is above evaluation.beam_size = 2"):
        search_settings(EvaluationSection(num_results=3), [Protocol(beam_size=2)])


def test_an_import_records_the_search_of_the_authors(tmp_path: Path) -> None:
    for objective, eos in (("scst", True), ("cross_entropy", None), (None, None)):
        out = tmp_path / str(objective)
        overrides = ["model.static_expansion=[4,8,16]", "model.num_heads=4"]
        files = {"checkpoint": GOLDEN / "checkpoint.pth", "tokens": GOLDEN / "tokens.pickle"}
        import_checkpoint("expansionnet_v2", **files, out=out, overrides=overrides, objective=objective)  # type: ignore[arg-type]
        bundle = load_bundle(out)
        positions = bundle.captioner.model.sizes.max_positions
        expected = Protocol(
            "expansionnet_v2", "grid", False, objective, eos, 1, 5, min(74, positions), "mean", collapse_repeats=False
        )  # type: ignore[arg-type]
        assert bundle_protocol(bundle.config) == expected
        assert bundle.search == EvaluationSection(beam_size=5, max_length=min(74, positions), decoding=PLAIN)


def test_a_service_searches_as_the_bundle_was_evaluated(tmp_path: Path) -> None:
    plain = load_bundle(make_bundle(tmp_path / "plain"))
    recorded = Protocol(beam_size=2, max_length=8, ranking="sum", collapse_repeats=True)
    bundle = load_bundle(make_bundle(tmp_path / "recorded", protocol=recorded))
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    captions, found = (
        [each.n_best for each in service.caption(pixels, service.changed_search({}, num_results=2))]
        for service in (CaptionService(plain, beam_size=2, max_length=8), CaptionService(bundle))
    )
    words = [each.caption.split() for ranked in captions for each in ranked]
    assert any(a == b for each in words for a, b in pairwise(each)), "nothing would be seen"
    for ranked in found:
        values = [each.log_prob for each in ranked]
        assert values == sorted(values, reverse=True)
        assert all(a != b for each in ranked for a, b in pairwise(each.caption.split()))
    longer = CaptionService(bundle, beam_size=3, max_length=9).search
    assert (longer.beam_size, longer.max_length, longer.ranking) == (3, 9, "sum")


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        ({"beam_size": 101}, "evaluation.beam_size = 101"),
        ({"num_models": -7}, "protocol.num_models"),
        ({"ranking": 1e300}, "evaluation.ranking is 1e"),
        ({"decoding": {"min_length": 10**9}}, "protocol.decoding.min_length = 1000000000"),
        ({"language": "x" * 10**4}, "protocol.language"),
        ({"unknown": 1}, "unknown key protocol.unknown"),
        ([1], "protocol"),
    ],
)
def test_protocols_of_strangers_are_refused(tmp_path: Path, protocol: Any, words: str) -> None:
    folder = without_digests(make_bundle(tmp_path / "bundle"))
    config = read_bundle_config(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"protocol": protocol}))
    with pytest.raises(UserError, match=words) as caught:
        load_bundle(folder)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
