"""The deployments of Ray Serve: an ingress that decodes images, and processes that caption batches of them.

Only this module imports ray.serve. What they do is in `pipeline/serving/`, which does not need Ray.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import time
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.serve._private import replica
from ray.serve.config import AutoscalingConfig, HTTPOptions
from ray.serve.handle import DeploymentHandle

from raycap.jobs.serve.arguments import ServeArguments, named_models, server_token
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle
from raycap.pipeline.runtime.batcher import Batcher
from raycap.pipeline.runtime.log import configure_logging
from raycap.pipeline.runtime.names import one_line, shown
from raycap.pipeline.runtime.processor import computing_thread, device_for
from raycap.pipeline.serving.address import NamedModel, weights_digest
from raycap.pipeline.serving.app import AppSettings, make_app
from raycap.pipeline.serving.host import ChampionWatcher, LoadedModel, ModelHost, load_source
from raycap.pipeline.serving.limits import RefusedError
from raycap.pipeline.serving.served_models import Answer, ExplainJob, ImageJob, Metrics, ServedModel, ServedModels

APP = "raycap"
INGRESS_CPUS, CAPTIONER_CPUS = 0.5, 1.0
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
SPARE_REQUESTS = 16  # of the ingress beyond its queue: for refusals, /healthz and /metrics
STATUS_S = 5.0  # between two looks at the state of the application
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
SHUTDOWN_S = 10.0  # for requests in progress


@serve.deployment
class CaptionerDeployment:
    """One process with one model."""

    def __init__(self, model: NamedModel, arguments: ServeArguments, gpus: float, *, is_local: bool) -> None:
        prepare_replica(is_local)
        settings = {"precision": arguments.precision, "device": device_for(gpus).type}

        def load(bundle: StoredBundle) -> LoadedModel:
            return load_source(bundle, weights_digest(bundle), settings, model.address)

        self.model = model
        self.thread = computing_thread(arguments.threads or num_threads(arguments, is_local))
        # a process that is replaced later starts with the champion of then
        source = model.source if model.address.champion is None else model.address.resolve()
        sent = model.sent
        self.host: ModelHost = self.thread.submit(
            lambda: ModelHost(
                load(source) if sent is None else load_source(sent, model.digest, settings, model.address)
            )
        ).result()
        self.watcher: ChampionWatcher | None = None
        if model.address.champion is not None:
            self.watcher = ChampionWatcher(model.address, self.host, source, load, arguments.poll_s)
            self.watcher.start()
        self.batcher: Batcher[ImageJob, Answer] = Batcher(self.host.caption, arguments.batch_size, self.thread)

    async def describe(self) -> tuple[dict[str, object], ImageTransform]:
        """`ModelHost.describe`, and for a followed champion whether a newer one could not be loaded."""
        description, transform = self.host.describe()
        if self.watcher is not None:
            description |= {"follows": self.model.address.text, "newer_failed": self.watcher.has_failed}
        return description, transform

    async def caption(self, jobs: list[ImageJob]) -> list[Answer]:
        """`ModelHost.caption` for the images of one request, in batches with those of others."""
        return await self.batcher(jobs)

    async def explain(self, job: ExplainJob) -> Answer:
        """`ModelHost.explain`. It waits for its turn among the batches."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.host.explain, job)


class RayCaptioners:
    """The captioning processes of one model (`pipeline.serving.served_models.Captioners`)."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.handle = handle

    async def describe(self) -> tuple[dict[str, object], ImageTransform]:
        found: tuple[dict[str, object], ImageTransform] = await self._call("describe")
        return found

    async def caption(self, jobs: list[ImageJob]) -> list[Answer]:
        answers: list[Answer] = await self._call("caption", jobs)
        return answers

    async def explain(self, job: ExplainJob) -> Answer:
        answer: Answer = await self._call("explain", job)
        return answer

    async def _call(self, method: str, *arguments: Any) -> Any:
        """The result of a method. RefusedError if its process has died, or none has room."""
        try:
            return await getattr(self.handle, method).remote(*arguments)
        except serve.exceptions.BackPressureError:
            raise RefusedError(503, "the model has too many requests; try again later", 1) from None
        except (ray.exceptions.RayActorError, serve.exceptions.RayServeException):
            raise RefusedError(503, "the model's process has ended and is started again; try again", 1) from None


@serve.deployment
@serve.ingress()
class Ingress:
    """The process that answers requests: limits, decoding, resizing, and the page. It computes with no model."""

    def __init__(
        self,
        arguments: ServeArguments,
        names: list[str],
        captioners: list[DeploymentHandle],
        *,
        has_token: bool,
        is_local: bool,
    ) -> None:
        prepare_replica(is_local)
        give_memory_back()
        # The token is read here: Ray shows the arguments of deployments to every client of its dashboard.
        token = server_token(None, insecure=not has_token)
        metrics = Metrics()
        models = {
            name: ServedModel(name, RayCaptioners(handle), metrics)
            for name, handle in zip(names, captioners, strict=True)
        }
        settings = AppSettings(
            arguments.limits, token, arguments.loopback_only, arguments.allow_uris, arguments.allow_attribution,
            arguments.options,
        )  # fmt: skip
        self.app_of_requests = make_app(ServedModels(models), settings, metrics)

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application, which Ray Serve asks for."""
        return self.app_of_requests


def application(args: dict[str, object]) -> serve.Application:
    """The application of a RayService (`import_path: raycap.jobs.serve.deployments:application`).

    args: the values of `ServeArguments`. Raises ValueError for others, and UserError.
    """
    arguments = ServeArguments.model_validate(args)
    server_token(None, arguments.insecure)
    return build(arguments, is_local=False)


def build(arguments: ServeArguments, *, is_local: bool, send_local: bool = False) -> serve.Application:
    """The deployments of a server. Raises UserError for models that cannot be served.

    is_local: on a Ray that this process has started. send_local: as for `named_models`.
    """
    models = named_models(arguments, send_local=send_local)
    gpus = arguments.gpus
    if gpus is None:
        gpus = float(ray.cluster_resources().get("GPU", 0) > 0)

    def captioner(model: NamedModel) -> serve.Application:
        deployment = _sized(CaptionerDeployment, f"captioner-{model.name}", arguments, gpus)
        return deployment.bind(model, arguments, gpus, is_local=is_local)

    captioners = [captioner(model) for model in models]
    ingress = Ingress.options(  # type: ignore[attr-defined]
        name="ingress",
        num_replicas=1,  # so that the queue and the counters are those of the whole server
        max_ongoing_requests=arguments.limits.queue + SPARE_REQUESTS,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        graceful_shutdown_timeout_s=SHUTDOWN_S,
    )
    has_token = server_token(None, insecure=True) is not None
    names = [model.name for model in models]
    return ingress.bind(arguments, names, captioners, has_token=has_token, is_local=is_local)


def _sized(deployment: Any, name: str, arguments: ServeArguments, gpus: float) -> serve.Deployment:
    """The deployment of one model's processes with a name, their number and resources."""
    scaling: dict[str, Any] = {"num_replicas": arguments.replicas}
    if not isinstance(arguments.replicas, int):
        least, most = arguments.replicas
        target = 2 * arguments.batch_size  # one batch is captioned, and the next one waits
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least, max_replicas=most, target_ongoing_requests=target
            )
        }
    return deployment.options(
        name=name,
        # Ray's default of 5 would never fill a batch; explanations wait here, too
        max_ongoing_requests=4 * arguments.batch_size,
        ray_actor_options={"num_cpus": CAPTIONER_CPUS, "num_gpus": gpus},
        graceful_shutdown_timeout_s=SHUTDOWN_S,
        **scaling,
    )


def needed_cpus(arguments: ServeArguments) -> int:
    """The CPUs that a Ray on this machine must have."""
    return math.ceil(INGRESS_CPUS + CAPTIONER_CPUS * num_captioners(arguments))


def num_captioners(arguments: ServeArguments) -> int:
    """The largest number of captioning processes."""
    replicas = arguments.replicas if isinstance(arguments.replicas, int) else arguments.replicas[1]
    return replicas * len(arguments.models)


def num_threads(arguments: ServeArguments, is_local: bool) -> int:
    """Torch's threads of a process: on this machine its share of the cores, in a cluster the CPUs that it asks for."""
    return max(1, (os.cpu_count() or 1) // num_captioners(arguments)) if is_local else math.ceil(CAPTIONER_CPUS)


def prepare_replica(is_local: bool) -> None:
    """Sets up the log of a process of Ray Serve, and lets it listen on the loopback interface if Ray runs only here.

    Ray Serve opens a port of each process on all interfaces, which unpickles what it gets. It does so after the
    constructors of deployments, so that the name can be replaced there.
    """
    configure_logging()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if is_local:
        add_port = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))


def give_memory_back() -> None:
    """Lets glibc return the memory of decoded images to the system, of which it would keep hundreds of MiB.

    Pillow allocates blocks of 16 MiB. glibc learns from their sizes to keep such blocks, unless the threshold is set.
    """
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def require_unused() -> None:
    """Raises UserError if Ray Serve already runs on the cluster.

    Its proxies cannot listen elsewhere, and the end of this server would be that of the other applications.
    """
    if found := serve.status().applications:
        raise UserError(
            f"Ray Serve already runs on this cluster, with the application {shown(next(iter(found)))}; stop it with "
            "`serve shutdown`, or serve on another cluster"
        )


def start(arguments: ServeArguments, host: str, port: int, *, is_local: bool) -> None:
    """Starts the server on a Ray that has been started. Raises UserError, and JobFailedError if it does not start.

    is_local: whether this process has started the Ray.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    limits = arguments.limits
    options = HTTPOptions(host=host, port=port, request_timeout_s=2 * limits.body_s + 11 * limits.answer_s)
    target = build(arguments, is_local=is_local, send_local=not is_local)
    serve.start(proxy_location="HeadOnly", http_options=options, logging_config=LOGGING)
    try:
        serve.run(target, name=APP, route_prefix="/", logging_config=LOGGING)
    except RuntimeError as error:
        raise JobFailedError(f"the server did not start: {one_line(error)}; Ray's logs have the reason") from error


def wait() -> None:
    """Returns when the application has ended; a signal raises KeyboardInterrupt."""
    while APP in serve.status().applications:
        time.sleep(STATUS_S)


def stop(*, is_local: bool) -> None:
    """Ends the application, if it has been started, after the requests in progress. In a cluster it ends Ray Serve."""
    with suppress(serve.exceptions.RayServeException):  # it has not been started
        serve.delete(APP)
    if not is_local:  # a local Ray ends with this process
        serve.shutdown()
