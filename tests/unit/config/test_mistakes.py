"""Mistakes in a configuration: one sentence with the key, its value and the remedy, and exit code 2."""

from __future__ import annotations

import pytest

from raycap.jobs.cli import main

MISTAKES = [
    ("model.d_modle=64", "unknown key model.d_modle: did you mean d_model"),
    ("stages.xe_frozen.epohcs=1", "unknown key stages.xe_frozen.epohcs: did you mean epochs"),
    ("stages.nothere.epochs=1", "'nothere' is none of xe_frozen"),
    ("model.name=meshed_memory", "unknown key model.static_expansion: known here: attended_regions"),
    ("model.name=expansionet_v2", "model.name is 'expansionet_v2', which is unknown: did you mean expansionnet_v2"),
    ("model={name: meshed_memory, num_memory_slots: many}", "model.num_memory_slots = 'many'"),
    ("model.num_heads=3", "model.d_model = 128 does not divide by model.num_heads = 3"),
    ("model.d_model=1000000", "model.d_model = 1000000: input should be less than or equal to 131072"),
    ("model.dropout=1", "model.dropout = 1: input should be less than 1"),
    (
        "evaluation.decoding={min_length: 1}",
        "decoding.min_length = 1: input should be greater than or equal to 2",
    ),
    ("evaluation.decoding={sampling: true, beam_groups: 2}", "beam_groups is 2; set one of them only"),
    ("model.d_model=true", "model.d_model = True: input should be a valid integer"),
    ("workers.num_workers=21", "batch_size = 20 is below 21 workers x 1 accumulated"),
    ("workers={gpus_per_worker: 0.5, num_workers: 2}", "gives two of 2 workers the same GPU"),
    ("workers.gpus_per_worker=1.5", "workers.gpus_per_worker: 1.5 GPUs are neither a whole number nor a part"),
    ("stages.xe_frozen.epochs=0", "stages.xe_frozen.epochs = 0"),
    ("stages.0.epochs=.inf", "stages.xe_frozen.epochs"),
    ("stages.xe_frozen.optimizer.layer_decay=0.8", "train_backbone is false; leave it out"),
    ("stages.xe_frozen.schedule={name: cosine, min_lr: 1}", "schedule.min_lr = 1 above lr = 0.001"),
    ("data.language=pt-BR", "'pt-BR' is not a language code"),
    ("data.language=de", "data.synthetic.language = en and data.language = de"),
    ("data.synthetic=null", "exactly one of data.synthetic and data.root"),
    ("data.annotations=other.json", "data.annotations belongs to a data set in data.root"),
    ("evaluation={num_results: 9}", "num_results = 9 is above evaluation.beam_size = 5 (the default); raise"),
    ("evaluation.metrics=[CIDEr-R, CIDEr-R]", "evaluation.metrics contains CIDEr-R more than once"),
    ("features={store: never, hdf5: synthetic}", "features.store is never, and without a backbone"),
    ("backbone.name=hf-hub:a/b", "backbone.name is 'hf-hub:a/b'"),
    ("backbone.image_size=30", "backbone.image_size is 30; it must be a multiple of the patches' 4 px"),
    ("name=..", "name '..' must be letters"),
    ("name=" + "a" * 101, "has 101 characters; the limit is 100"),
    ("storage=s3:/bucket", "storage.uri: 's3:/bucket' is neither a folder nor"),
    ("storage=~nobody-has-this-name/x", "storage.uri: the text begins with ~"),
    ('init_from="\\ud800"', "init_from: the text has control characters or is not UTF-8"),
    ("nonsense", "--set 'nonsense' is not of the form a.b=value"),
    ("seed=" + "[" * 1_100, "--set seed is nested more than"),
    ("seed=" + "9" * 900, "(900 characters): input should be less than"),
    ("a" * 100_000 + "=1", "characters)"),
    ("data.root=${NOT_SET_ANYWHERE}", "needs the environment variable NOT_SET_ANYWHERE"),
]


@pytest.mark.parametrize(("override", "said"), MISTAKES)
def test_mistakes_are_one_short_sentence(override: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "demo", "--set", override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.isprintable() and len(line) < 700
