"""`raycap soup`: the written bundle, the weighted sum of weights, what stays bit for bit, and what is refused."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycap.jobs.cli import main
from raycap.jobs.soup import mixed_tensors
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import load_bundle, save_bundle, store_results
from raycap.pipeline.storage.path import storage_path
from tests.support.bundles import make_bundle
from tests.support.confidence import make_confidence


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two bundles of one architecture; only their random weights differ."""
    folder = tmp_path_factory.mktemp("bundles")
    return [str(make_bundle(folder / name, seed)) for seed, name in enumerate("ab")]


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def test_a_soup_is_a_bundle_that_names_its_sources(
    tmp_path: Path, bundles: list[str], log_lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, members = tmp_path / "new" / "soup", [load_bundle(Path(bundle)) for bundle in bundles]
    judging, first = tmp_path / "judging", members[0]
    save_bundle(judging, first.captioner, first.vocabulary, name="small", info={})
    store_results(storage_path(judging), make_confidence("a"))  # that of the member and not that of the sum
    assert main(["soup", str(judging), bundles[1], "--weights", "0.25,0.75", "-o", str(out)]) == 0
    assert f"source    0.25 of {judging}" in log_lines and log_lines[-1] == f"bundle    {out}"
    joined = load_bundle(out)
    info = joined.config["info"]
    assert (info["source 2"], info["weight 2"]) == (bundles[1], 0.75) and len(info["sha256 2"]) == 64
    assert joined.vocabulary == first.vocabulary and joined.transform == first.transform
    assert joined.confidences == ()
    expected = mixed_tensors([member.captioner.state_dict() for member in members], [0.25, 0.75])
    assert_equal(joined.captioner.state_dict(), expected)
    assert main(["soup", *bundles, "-o", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_full_disk_is_said_in_a_sentence(
    tmp_path: Path, bundles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, limits[1]))
    try:
        assert main(["soup", *bundles, "-o", str(tmp_path / "soup")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in capsys.readouterr().err and not list(tmp_path.iterdir())


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any), st.integers(0, 10**6))
def test_the_sum_is_numpys(shares: list[int], seed: int) -> None:
    weights = [share / sum(shares) for share in shares]
    generator = np.random.default_rng(seed)
    arrays = [generator.normal(size=(3, 5)).astype(np.float32) for _ in weights]
    states = [{"x": torch.from_numpy(array), "steps": torch.tensor(7)} for array in arrays]
    found = mixed_tensors(states, weights)
    expected = sum(weight * array.astype(np.float64) for weight, array in zip(weights, arrays, strict=True))
    np.testing.assert_allclose(found["x"].numpy(), expected, rtol=0, atol=1e-6)
    assert found["x"].dtype == torch.float32 and found["steps"] == 7


def test_half_precision_is_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(100, generator=generator).bfloat16() for _ in range(2)]
    found = mixed_tensors([{"x": tensor} for tensor in tensors], [0.3, 0.7])["x"]
    expected = 0.3 * tensors[0].float() + 0.7 * tensors[1].float()
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


def test_whole_numbers_that_differ_are_refused() -> None:
    states = [{"index": torch.tensor([number])} for number in (1, 2)]
    with pytest.raises(UserError, match="the tensor index has whole numbers that differ"):
        mixed_tensors(states, [1.0, 0.0])
