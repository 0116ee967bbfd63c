"""Requests per second and latencies of `raycap serve`, beside the same model in a plain loop."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import numpy as np
import torch
import typer
import urllib3

from raycap.jobs.serve import deployments
from raycap.jobs.serve.command import require_free
from raycap.pipeline.cluster.start import connect
from raycap.pipeline.runtime.processor import prepare_processor
from raycap.pipeline.serving.address import ServeArguments, named_models
from raycap.pipeline.serving.host import load_address

from measuring import noise_jpegs

PERCENTILES = (50, 95, 99)


def bench_serve(
    model: Annotated[str, typer.Option(help="A bundle's folder or s3://...")],
    requests: Annotated[int, typer.Option(min=10, help="Requests per number of clients.")] = 200,
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Numbers of clients. The default is 1, 8, 32.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the server on the loopback interface.")] = 8765,
    threads: Annotated[int, typer.Option(min=1, help="Torch's threads of the model's process and of the loop.")] = 1,
) -> None:
    """Requests per second of a served model.

    The requests are JPEG files of 640 x 480 noise, one per request, sent over kept connections by this process, which
    shares the machine with the server. The loop decodes and captions the same files in this process, one at a time and
    in batches of 16.

    Example: python benchmarks/serve.py --model results/models/demo/RUN
    """
    files = list(noise_jpegs(16, rows=30, columns=40))
    prepare_processor(threads)
    service = load_address(model, "results", device=None).service
    for size in (1, 16):
        count, begin = 0, time.monotonic()
        while count < requests and (count < 32 or time.monotonic() - begin < 30):
            list(service.caption_images([files[number % 16] for number in range(size)], batch_size=size))
            count += size
        print(f"plain loop, batches of {size:<3} {count / (time.monotonic() - begin):8.1f} images/s", flush=True)
    del service
    torch.set_num_threads(1)
    require_free("127.0.0.1", port)
    arguments = ServeArguments(models=(f"model={model}",), loopback_only=True, threads=threads)
    is_local = not connect(None, deployments.needed_cpus(arguments))
    try:
        deployments.start(arguments, named_models(arguments), "127.0.0.1", port, is_local=is_local)
        address = f"http://127.0.0.1:{port}"
        _run(address, files, 16, 4)  # warm up
        print(
            f"{'clients':>7} {'requests/s':>11} " + " ".join(f"{f'p{each} ms':>8}" for each in PERCENTILES) + "  batch"
        )
        for count in clients or (1, 8, 32):
            batches_before, images_before = _batches(address)
            begin = time.monotonic()
            seconds = _run(address, files, requests, count)
            rate = requests / (time.monotonic() - begin)
            batches, images = _batches(address)
            mean = (images - images_before) / max(1.0, batches - batches_before)
            points = " ".join(f"{1000 * value:8.0f}" for value in np.percentile(seconds, PERCENTILES))
            print(f"{count:>7} {rate:>11.1f} {points}  {mean:.1f}", flush=True)
    finally:
        deployments.stop()


def _run(address: str, files: Sequence[bytes], requests: int, clients: int) -> list[float]:
    """The seconds of each request. Raises RuntimeError for an answer that is no caption."""
    pool = urllib3.PoolManager(maxsize=clients)

    def ask(number: int) -> float:
        begin = time.monotonic()
        fields = {"images": ("a.jpg", files[number % len(files)])}
        answer = pool.request("POST", f"{address}/caption", fields=fields, retries=False, timeout=120)
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {answer.data[:200]!r}")
        return time.monotonic() - begin

    with ThreadPoolExecutor(clients) as threads:
        return list(threads.map(ask, range(requests)))


def _batches(address: str) -> tuple[float, float]:
    """The number of batches so far, and of their images."""
    text = urllib3.request("GET", f"{address}/metrics").data.decode()
    found = dict(re.findall(r"^raycap_batch_size_(count|sum)\S* (\S+)$", text, re.MULTILINE))
    return float(found.get("count", 0)), float(found.get("sum", 0))


if __name__ == "__main__":
    typer.run(bench_serve)
