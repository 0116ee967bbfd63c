"""Every tutorial does what its page says, in a short form: the page's own commands with smaller sizes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, small_config
from tests.support.ray_cluster import Cluster, free_port, on_disk, worker_cluster
from tests.support.runs import STAGES
from tests.support.s3_server import s3_server
from tests.support.tutorials import run_page

pytestmark = [pytest.mark.proof, pytest.mark.ray]
TUTORIALS = ROOT / "docs" / "tutorials"


def with_keys(**values: Any) -> str:
    """The options `--set` for these keys, which have `__` in place of dots."""
    return "".join(f" --set {key.replace('__', '.')}={value}" for key, value in values.items())


# A model that trains in seconds. Its captions have at least three words, although it has learned little.
SMALL_MODEL = {
    "backbone__image_size": 32,
    "backbone__embed_dim": 8,
    "backbone__window_size": 4,
    "model__d_model": 16,
    "model__d_ff": 32,
    "model__num_heads": 2,
    "workers__num_workers": 1,
    "workers__dry_run": "false",
    "evaluation__beam_size": 2,
    "evaluation__decoding__min_length": 3,
}


def test_another_language(tmp_path: Path) -> None:
    epochs = {f"stages__{stage}__epochs": 0.5 for stage in STAGES}
    few, short = with_keys(data__synthetic__num_images=60), with_keys(**SMALL_MODEL, **epochs, data__min_count=1)
    check, run = "raycap check demo_zh\n", "raycap run demo_zh"
    changes = {check: f"{check.rstrip()}{few}\n", run: run + few + short, "num_images=300": "num_images=60"}
    outputs = run_page(TUTORIALS / "another_language.md", tmp_path, changes)
    assert "fit to train on" in outputs[0].splitlines()[-1]
    assert "METEOR unavailable" in outputs[1] and "finished in" in outputs[1].splitlines()[-1]
    assert len(outputs[2].splitlines()) == 10, "a caption for each image"
    assert "CIDEr-D" in outputs[3]
    assert "language  zh (Cjk), tokenizer characters" in outputs[4]
    assert "not in the vocabulary" in outputs[5] and "not in the vocabulary" not in outputs[6]


def test_search_g_and_n_e(tmp_path: Path) -> None:
    base = {key: value for key, value in SMALL_MODEL.items() if not key.startswith("evaluation")}
    base |= {"data__synthetic__num_images": 60} | {f"stages__{stage}__epochs": 0.5 for stage in STAGES}
    trials = {f"set__{key}": value for key, value in base.items()}
    trials |= {"budget__trials": 2, "trial__epochs": 1}
    changes = {
        " --set data.synthetic.num_images=600": with_keys(**base),
        " --set set.data.synthetic.num_images=600": with_keys(**trials),
    }
    outputs = run_page(TUTORIALS / "search_g_and_n_e.md", tmp_path, changes)
    assert "finished in" in outputs[0].splitlines()[-1] and "backbone  from the run" in outputs[1]
    assert "trials, " in outputs[2]
    assert {"best.yaml", "pareto.png", "search.html", "trials.csv"} <= set(outputs[3].split())
    assert outputs[4].splitlines()[-1].startswith("2 trials, the best one: {")
    assert "finished in" in outputs[5].splitlines()[-1]


def test_champion_to_page(tmp_path: Path) -> None:
    port, epochs = free_port(), with_keys(stages__xe_frozen__epochs=0.2, stages__xe_finetune__epochs=0.2)
    changes = {
        "num_images=150": f"num_images=60{epochs}",
        "num_images=600": "num_images=150 --set retrain.confidence=0.5",  # enough to be better than nearly untrained
        "--poll-s 5": f"--poll-s 0.5 --threads 1 --port {port}",
        "127.0.0.1:8000": f"127.0.0.1:{port}",
    }
    outputs = run_page(TUTORIALS / "champion_to_page.md", tmp_path, changes)
    assert "decision  first" in outputs[0] and outputs[1].startswith("serving")
    first = json.loads(outputs[2])
    assert "caption" in first["captions"][0] and len(outputs[3].splitlines()) == 3
    assert "decision  promoted" in outputs[4]
    (served,) = json.loads(outputs[5])["models"]
    assert served["digest"] != first["model"]["digest"]
    assert outputs[6].endswith(f'digest":"{first["model"]["digest"]}\n')


SSH = """#!{python}
import os, psutil, sys
node, *words = sys.argv[1:]
if words == ["sudo", "poweroff"]:
    process = psutil.Process({pids}[node])
    for each in [*process.children(recursive=True), process]:
        each.kill()
else:
    command = {commands}[node] + words
    os.execvp(command[0], command)
"""


def write_ssh(cluster: Cluster, place: Path) -> None:
    """A program `ssh worker-N` that runs a command on the disk of that node, and ends the node for `sudo poweroff`."""
    names = {f"worker-{number}": number for number in range(1, len(cluster.nodes))}
    pids = {name: cluster.nodes[number].pid for name, number in names.items()}
    commands = {name: on_disk(cluster.folder, str(number), []) for name, number in names.items()}
    place.write_text(SSH.format(python=sys.executable, pids=pids, commands=commands))
    place.chmod(0o755)


def test_private_disks(tmp_path: Path) -> None:
    """The storage is slow, and each step of the second stage waits for a checkpoint, so its 60 steps take a minute.

    So the node is lost during this stage even on a fast machine, and a slow machine does not have to compute more.
    """
    with s3_server(delay_s=0.1) as url:
        lose_a_node(tmp_path, url)


def lose_a_node(tmp_path: Path, s3: str) -> None:
    variables = {"AWS_ENDPOINT_URL_S3": s3, "RAY_AUTH_MODE": "disabled"}
    values = small_config("s3://data/tutorial")
    values["stages"] = values["stages"][:2]
    values["stages"][1] |= {"epochs": 10, "validate_every_epochs": 10, "checkpoint_every_steps": 1}
    values["workers"] |= {"num_workers": 2, "dry_run": False}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / ".bin").mkdir()
    with worker_cluster(**variables) as cluster:
        write_ssh(cluster, tmp_path / ".bin/ssh")
        changes = {
            "doctor demo": "doctor run.yaml",
            "run demo": "run run.yaml",
            "http://head:8265": cluster.dashboard,
            "s3://bucket/prefix": "s3://data/tutorial",
            "/var/cache/raycap": f"{cluster.disk}/cache",
        }
        outputs = run_page(TUTORIALS / "private_disks.md", tmp_path, changes, **variables)
    assert "run.yaml can run here" in outputs[0] and "conditional write, read and delete work" in outputs[0]
    assert {"images", "shards", "workers"} <= set(outputs[2].split())
    assert "failure 1 within an hour" in outputs[3] and "continues from step" in outputs[3]
    assert re.search(r"Job '.*' succeeded", outputs[3])
    assert "continues from step" not in outputs[4] and "succeeded" in outputs[4].splitlines()[-1]
    assert "complete" in outputs[5] and "1 runs" in outputs[5]
