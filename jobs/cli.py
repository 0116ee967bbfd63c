"""`raycap`: the command line. Exit codes: 0 success, 2 the caller's mistake (one sentence), 1 a failure."""

from __future__ import annotations

import io
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from jobs.bench.command import bench
from jobs.cli_cluster import PASSES_ON, doctor, submit
from pipeline.config.sections import SEARCH_DEFAULTS
from pipeline.errors import UserError
from pipeline.runtime.log import configure_logging

app = typer.Typer(
    help="Train, tune and evaluate image-captioning models on a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(help="The run's YAML file.", metavar="CONFIG")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=value", help="Override a key; stages by name: stages.xe_frozen.epochs=1."),
]
Address = Annotated[str | None, typer.Option(help="A Ray cluster's address; without it a local Ray is started.")]


@app.callback()
def _root() -> None:
    pass


@app.command()
def run(config: Config, set_: Set = None, address: Address = None) -> None:
    """From images to a scored, registered model. Finished parts are not done again.

    Example: raycap run configs/demo.yaml --set seed=1
    """
    from pipeline.config.load import load_config

    parsed = load_config(config, set_ or ())
    from jobs.run import run as run_all

    run_all(parsed, address)


@app.command()
def check(
    config: Config,
    set_: Set = None,
    json: Annotated[Path | None, typer.Option(help="Write everything found as JSON.")] = None,
) -> int:
    """Says whether the data set is fit to train on, and what is odd about it. Exit code 1 when it is not.

    Example: raycap check configs/coco_subset.yaml --set data.root=/path/to/folder
    """
    from pipeline.config.load import load_config

    parsed = load_config(config, set_ or ())
    from jobs.check import check as check_data

    return check_data(parsed, json)


@app.command()
def extract(
    config: Config,
    set_: Set = None,
    address: Address = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read the whole store back and compare digests.")] = False,
) -> int:
    """Features of a data set with a backbone into the feature store. Images that are there are not computed again.

    Example: raycap extract configs/coco_subset.yaml --set data.root=/path/to/folder --verify
    """
    from pipeline.config.load import load_config

    parsed = load_config(config, set_ or ())
    from jobs.extract import extract as extract_features

    return extract_features(parsed, address, verify)


@app.command()
def score(
    references: Annotated[Path, typer.Option(help="Captions in COCO's or Karpathy's form; gzip is read as it is.")],
    predictions: Annotated[Path, typer.Option(help="A COCO result file: a list of image_id and caption.")],
    json: Annotated[Path | None, typer.Option(help="Write scores, signature and extras as JSON.")] = None,
    per_image: Annotated[Path | None, typer.Option(help="Write a row an image, .parquet or .csv.")] = None,
    split: Annotated[str | None, typer.Option(help="Only this split of a Karpathy file, all of it.")] = None,
    complete: Annotated[bool, typer.Option("--complete", help="Every reference image needs a prediction.")] = False,
) -> None:
    """Scores any COCO-format result file: BLEU, METEOR, ROUGE-L, CIDEr-D and SPICE. Needs no model and no Ray.

    Example: raycap score --references captions_val2014.json --predictions results.json --json scores.json
    """
    from jobs.score import score as score_files

    score_files(references, predictions, json_file=json, per_image=per_image, split=split, complete=complete)


@app.command()
def evaluate(
    config: Config,
    set_: Set = None,
    split: Annotated[list[str] | None, typer.Option(help="A split, or all; data.test_splits by default.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model bundle in place of the run's; several: ensemble.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="The run's model as it was after this stage.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another bundle: captions beside these, scores' difference.")
    ] = None,
    features: Annotated[str | None, typer.Option(help="A feature store, for bundles without a backbone.")] = None,
    constraints: Annotated[Path | None, typer.Option(help="Words that each image's caption must hold.")] = None,
    server: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also the COCO server's result file and zip.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for what comes out.")] = None,
    address: Address = None,
) -> int:
    """Captions a split with a run's model, or with bundles, and scores it. Exit code 1 when an image cannot be read.

    Example: raycap evaluate configs/demo.yaml --stage xe_finetune --split test
    """
    from pipeline.config.load import load_config

    parsed = load_config(config, set_ or ())
    from jobs.evaluate import EvaluateOptions
    from jobs.evaluate import evaluate as evaluate_splits

    options = EvaluateOptions(
        splits=split or (),
        models=model or (),
        stage=stage,
        compare=compare,
        features=features,
        constraints=constraints,
        server=server,
        out=out,
    )
    return evaluate_splits(parsed, options, address)


@app.command()
def constraints(
    detections: Annotated[Path, typer.Option(help="Boxes with classes: COCO's JSON, or JSON lines.")],
    out: Annotated[Path, typer.Option(help="The constraint file, for `raycap evaluate --constraints`.")],
    hierarchy: Annotated[Path | None, typer.Option(help="Open Images' class hierarchy.")] = None,
    class_names: Annotated[Path | None, typer.Option(help="CSV of code and name, for a hierarchy of codes.")] = None,
    exclude: Annotated[Path | None, typer.Option(help="Classes to leave out, in place of the usual 39.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Constraints an image, the most confident.")] = 3,
    overlap: Annotated[float, typer.Option(help="Of two boxes that share this much the general class goes.")] = 0.85,
    model: Annotated[Path | None, typer.Option(help="A bundle: leave out classes that it has no words for.")] = None,
) -> int:
    """The words that captions must hold, from an object detector's boxes.

    Example: raycap constraints --detections boxes.json --hierarchy hierarchy.json --out constraints.jsonl
    """
    from jobs.constraints import constraints as make_constraints

    return make_constraints(
        detections,
        hierarchy,
        out,
        class_names=class_names,
        exclude=exclude,
        most=most,
        overlap=overlap,
        model=model,
    )


@app.command()
def tune(
    config: Annotated[Path, typer.Argument(help="The search's YAML file.", metavar="CONFIG")],
    set_: Set = None,
    retry_failed: Annotated[bool, typer.Option(help="Also run again the trials that failed.")] = False,
    address: Address = None,
) -> int:
    """A search over G, N_E and whatever else the YAML names. Killed, the same command goes on where it was.

    Example: raycap tune configs/search_demo.yaml --set budget.trials=16
    """
    from jobs.tune.command import tune as search

    return search(config, set_ or [], address, retry_failed=retry_failed)


@app.command()
def caption(
    images: Annotated[list[str], typer.Argument(help="Files, folders, globs, s3:// URIs.", metavar="IMAGES...")],
    model: Annotated[str, typer.Option(help="A model bundle's folder.")],
    json: Annotated[bool, typer.Option("--json", help="JSON lines with log-probabilities in place of text.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON lines there; what is there is not done again.")] = None,
    beam: Annotated[int, typer.Option(min=1, max=100, help="Beams per image.")] = SEARCH_DEFAULTS.beam_size,
    n_best: Annotated[int, typer.Option(min=1, help="Captions per image, best first.")] = SEARCH_DEFAULTS.num_results,
    max_length: Annotated[
        int, typer.Option(min=3, help="Tokens per caption with its begin and end.")
    ] = SEARCH_DEFAULTS.max_length,
    precision: Annotated[
        str,
        typer.Option(
            help="float32, or bfloat16: faster for large models on a processor that has it; a few captions differ."
        ),
    ] = SEARCH_DEFAULTS.precision,
    explain: Annotated[
        Path | None, typer.Option(help="Write pictures: where each word looked, what spoke for it.")
    ] = None,
    address: Address = None,
) -> int:
    """Captions for one's own images. A few are captioned here, many through Ray. Exit code 1 when one cannot be read.

    Example: raycap caption photos/ 'more/*.jpg' --model results/models/demo/RUN --json
    """
    from jobs.caption import CaptionOptions
    from jobs.caption import caption as caption_images

    options = CaptionOptions(
        json_lines=json,
        out=out,
        beam_size=beam,
        num_results=n_best,
        max_length=max_length,
        precision=precision,
        explain=explain,
        address=address,
    )
    return caption_images(images, model, options)


@app.command()
def retrain(
    config: Config,
    set_: Set = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="Give the place back to the previous champion.")] = False,
    address: Address = None,
) -> int:
    """What a schedule calls: new data in, a better model out, or nothing changed. Safe at any time, and twice at once.

    Exit code 0 also when there is nothing to do; 1 for bad data, which changes nothing.

    Example: raycap retrain configs/retrain_demo.yaml
    """
    from pipeline.config.load import load_config

    parsed = load_config(config, set_ or ())
    from jobs.retrain import retrain as retrain_champion

    return retrain_champion(parsed, roll_back=rollback, address=address)


@app.command("import")
def import_(
    source: Annotated[str, typer.Option("--from", metavar="FORMAT", help="expansionnet_v2 or meshed_memory.")],
    checkpoint: Annotated[Path, typer.Option(help="The upstream checkpoint; read as tensors, nothing in it runs.")],
    tokens: Annotated[Path, typer.Option(help="Its vocabulary pickle; only plain values are read.")],
    out: Annotated[Path, typer.Option(help="The bundle's folder.")],
    config: Annotated[Path | None, typer.Option(help="YAML with what a checkpoint does not hold.")] = None,
    set_: Set = None,
    backbone: Annotated[Path | None, typer.Option(help="A Swin checkpoint, for a captioner that comes alone.")] = None,
) -> None:
    """An upstream checkpoint and its vocabulary into a model bundle.

    Example: raycap import --from expansionnet_v2 --checkpoint rf_model.pth --tokens demo_coco_tokens.pickle --out model
    """
    from jobs.import_ import import_checkpoint

    import_checkpoint(
        source,
        checkpoint=checkpoint,
        tokens=tokens,
        out=out,
        config=config,
        overrides=set_ or (),
        backbone=backbone,
    )


@app.command()
def sync(
    target: Annotated[
        Path, typer.Argument(help="A run's folder, a storage's, or a configuration.", metavar="[RUN_FOLDER|CONFIG]")
    ] = Path("results"),
    set_: Set = None,
) -> int:
    """Sends what a tracker that was down has missed. Exit code 1 when it does not take everything.

    Example: raycap sync results/runs/RUN --set tracking.uri=http://127.0.0.1:5000
    """
    from jobs.sync import sync as send_missing

    return send_missing(target, set_ or ())


app.command(context_settings=PASSES_ON)(submit)
app.command()(doctor)
app.add_typer(bench, name="bench")


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a log file shows what a terminal would; file names that are no UTF-8 are shown escaped
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    configure_logging()
    try:
        result = app(args=argv, standalone_mode=False)
    except UserError as error:
        print(f"raycap: {error}", file=sys.stderr)
        return 2
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("raycap: stopped; the same command continues", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) or type(error).__name__ == "StageFailedError":
            print(f"raycap: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
        raise
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # click's own: wrong options
            error.show()
            return int(error.exit_code)
        raise
    return int(result or 0)


def _interrupt(*_: object) -> None:
    """A scheduler's SIGTERM ends a run as Ctrl-C does: the tracker is told, the same command continues."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
