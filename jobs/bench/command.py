"""The commands behind BENCHMARKS.md: `raycap bench`, registered by `jobs.cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="The benchmarks behind BENCHMARKS.md.", no_args_is_help=True, rich_markup_mode=None)


@bench.command("models")
def bench_models(
    images: Annotated[int, typer.Option(help="Images a batch.")] = 16,
    repeats: Annotated[int, typer.Option(help="Runs of each form; medians are shown.")] = 5,
    threads: Annotated[int | None, typer.Option(help="torch's threads; without it, torch's choice.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """The factorized, cached model beside the materialized, prefix-recomputing one; and what Table VI's rows cost.

    Example: raycap bench models --images 16
    """
    from jobs.bench.models import bench_models as run_bench

    run_bench(images=images, repeats=repeats, threads=threads, device=device)


@bench.command("metrics")
def bench_metrics(
    images: Annotated[int, typer.Option(help="How many images, with five references each.")] = 5000,
    references: Annotated[Path | None, typer.Option(help="Real captions; without it they are made up.")] = None,
) -> None:
    """BLEU, ROUGE-L and CIDEr-D with tokenization beside pycocoevalcap, in one run.

    Example: raycap bench metrics --images 5000
    """
    from jobs.bench.metrics import bench_metrics as run_bench

    run_bench(images, references)


@bench.command("caption")
def bench_caption(
    images: Annotated[int, typer.Option(min=1, help="Images a batch.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, after a warm-up.")] = 3,
    threads: Annotated[int | None, typer.Option(help="torch's threads; without it, torch's choice.")] = None,
) -> None:
    """Images a second of beam 5 at the paper's size, from features and from image files.

    Example: raycap bench caption --images 8
    """
    from jobs.bench.caption import bench_caption as run_bench

    run_bench(images, repeats, threads)


@bench.command("ray")
def bench_ray(pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs, one of each.")] = 4) -> None:
    """What Ray Train adds to a step, and how long a step waits for data.

    Example: raycap bench ray --pairs 6
    """
    from jobs.bench.ray import bench_ray as run_bench

    run_bench(pairs)


@bench.command("tracker")
def bench_tracker(
    rounds: Annotated[int, typer.Option(min=1, help="How often each of the three is measured.")] = 6,
    threads: Annotated[int | None, typer.Option(help="torch's threads; all cores by default.")] = None,
) -> None:
    """What a tracker that answers, and one that is stopped, add to a step.

    Example: raycap bench tracker --rounds 8
    """
    from jobs.bench.tracker import bench_tracker as run_bench

    run_bench(rounds, threads)


@bench.command("reward")
def bench_reward(
    references: Annotated[Path | None, typer.Option(help="Real captions; without it they are made up.")] = None,
) -> None:
    """CIDEr-D rewards a second on one core, beside a plain Python scorer.

    Example: raycap bench reward --references dataset_coco_val2014_karpathy.json.gz
    """
    from jobs.bench.reward import bench_reward as run_bench

    run_bench(references)


@bench.command("train")
def bench_train(
    repeats: Annotated[int, typer.Option(help="Steps measured a case.")] = 5,
    threads: Annotated[int | None, typer.Option(help="torch's threads; without it, torch's choice.")] = None,
) -> None:
    """Training steps at the paper's size on random features; on CUDA also the four stages at the paper's batches.

    Example: raycap bench train --repeats 5
    """
    from jobs.bench.train import bench_train as run_bench

    run_bench(repeats, threads)


@bench.command("extract")
def bench_extract(
    images: Annotated[Path | None, typer.Option(help="A folder of photographs; without it noise is drawn.")] = None,
    count: Annotated[int, typer.Option(help="How many of them.")] = 400,
    image_size: Annotated[int, typer.Option(help="The square that the backbone sees.")] = 224,
    batch_size: Annotated[int, typer.Option(help="Images a batch and a shard.")] = 16,
    threads: Annotated[int | None, typer.Option(help="torch's threads on both sides; all cores by default.")] = None,
) -> None:
    """Extraction through Ray Data beside a plain loop with the same backbone, in one run.

    Example: raycap bench extract --images /path/to/photographs
    """
    from jobs.bench.features import bench_extract as run_bench

    run_bench(images, count, image_size, batch_size, threads)


@bench.command("store")
def bench_store(
    folder: Annotated[Path | None, typer.Option(help="Where the store is made; the temporary folder.")] = None,
    gigabytes: Annotated[float, typer.Option(help="Its size.")] = 4.5,
    batch: Annotated[int, typer.Option(help="Rows a gather.")] = 48,
    batches: Annotated[int, typer.Option(help="How many gathers.")] = 40,
) -> None:
    """Random rows out of the feature store, cold and warm.

    Example: raycap bench store --folder /fast/disk
    """
    from jobs.bench.features import bench_store as run_bench

    run_bench(folder, gigabytes, batch, batches)


@bench.command("plan")
def bench_plan(
    folder: Annotated[Path | None, typer.Option(help="Where a million links are made; the temporary folder.")] = None,
) -> None:
    """The plan of an extraction of a million images of which a thousand are new: time and memory.

    Example: raycap bench plan
    """
    from jobs.bench.features import bench_plan as run_bench

    run_bench(folder)
