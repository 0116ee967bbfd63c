"""S3 refuses every request for a minute in each part of a run. The run ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.conftest import small_config
from tests.support.runs import run_with_own_cache, start_raycap
from tests.support.s3_server import plan_outage, s3_server

OUTAGE_S = 60.0
pytestmark = [pytest.mark.proof, pytest.mark.ray]


def scores(output: str) -> str:
    return output.partition("BLEU-1")[2].partition("report")[0]


def test_a_run_survives_an_outage_in_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCAP_CACHE", str(tmp_path / "cache"))
    with s3_server() as url:
        configs = {}
        for name, storage in (("s3", {"uri": "s3://data/runs", "endpoint_url": url}), ("disk", str(tmp_path / "disk"))):
            values = small_config(storage, workers__num_workers=2, features__max_images_for_tasks=0)
            configs[name] = tmp_path / f"{name}.yaml"
            configs[name].write_text(yaml.safe_dump(values | {"tracking": {"enabled": True}}))
        plan_outage(url, OUTAGE_S, at="/shards/")
        plan_outage(url, OUTAGE_S, at="/xe_finetune/step-")
        process, lines = start_raycap("run", str(configs["s3"])), []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if line.startswith("evaluate  ") and " with beam " in line:
                    plan_outage(url, OUTAGE_S)
                    plan_outage(url, 0, at="/report.html")  # so that the outage begins before the registration
                    plan_outage(url, OUTAGE_S, at="/tracked.json")
            code = process.wait()
        finally:
            process.kill()
    output = "".join(lines)
    assert code == 0, output[-4000:]
    assert output.count(" times (") >= 2, output  # of the driver: workers write theirs to Ray's files
    expected = run_with_own_cache(configs["disk"], tmp_path / "cache of disk")
    assert scores(output) == scores(expected) and "CIDEr-D" in output
