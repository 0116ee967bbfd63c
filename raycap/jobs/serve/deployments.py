"""The deployments of Ray Serve: an ingress that decodes images, and processes that caption batches of them.

The deployments call the code in `pipeline/serving/`, which does not need Ray. Only this module imports ray.serve.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve._private import replica
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentHandle

from raycap.models.config import Values
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.errors import JobFailedError, UserError
from raycap.pipeline.runtime.log import configure_logging
from raycap.pipeline.runtime.names import one_line, shown
from raycap.pipeline.runtime.processor import computing_thread, device_for, num_cores
from raycap.pipeline.serving.address import CLUSTER, Limits, NamedModel, ServeArguments, named_models, server_token
from raycap.pipeline.serving.app import Captioners, make_app
from raycap.pipeline.serving.host import Answer, Batcher, ImageJob, ModelHost, RefusedError

APP = "raycap"
INGRESS_CPUS, CAPTIONER_CPUS = 0.5, 1.0
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
SPARE_REQUESTS = 16  # accepted beyond the queue, so that the ingress can refuse them and answer /metrics
STATUS_S = 5.0  # seconds between two checks whether the application has ended
SHUTDOWN_S = 10.0  # seconds that requests in progress may still take when Ray Serve ends a process


@serve.deployment
class CaptionerDeployment:
    """A process that captions with one model. `app.Captioners` describes how its methods are called."""

    def __init__(self, model: NamedModel, arguments: ServeArguments, gpus: float, *, is_local: bool) -> None:
        prepare_replica(is_local)
        address, follows = model.address, model.address.champion is not None
        source = address.resolve() if follows else model.source  # the champion may have changed since the start
        settings = {"precision": arguments.precision, "device": device_for(gpus).type}
        # Each process computes with its share of this machine's cores or, in a cluster, with the CPUs asked of Ray.
        share = num_cores() // arguments.num_captioners if is_local else math.ceil(CAPTIONER_CPUS)
        self.thread = computing_thread(arguments.threads or max(1, share))
        self.host = self.thread.submit(ModelHost, address, source, settings).result()
        if follows:
            threading.Thread(target=self.host.follow, args=(arguments.poll_s,), daemon=True).start()
        self.batcher = Batcher(self.host.caption, arguments.batch_size, self.thread)

    async def describe(self) -> tuple[dict[str, object], ImageTransform]:
        """The model's description and its transform. "newer_failed" is true if a newer champion cannot be loaded."""
        current = self.host.current
        description: dict[str, object] = asdict(current.info)
        if self.host.address.champion is not None:
            description |= {"follows": self.host.address.text, "newer_failed": bool(self.host.failure)}
        return description, current.service.transform

    async def caption(self, jobs: list[ImageJob]) -> list[Answer]:
        """Captions the images of one request by `ModelHost.caption`, in batches with images of other requests."""
        return await self.batcher(jobs)

    async def explain(self, jobs: list[ImageJob], *arguments: Any) -> list[Answer]:
        """Answers one request by `ModelHost.explain`, between two batches of captions."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.host.explain, jobs, *arguments)


def ray_captioners(handle: DeploymentHandle) -> Captioners:
    """The function that calls a model's processes. The call raises RefusedError if all are busy or its process died."""

    async def call(method: str, *arguments: object) -> Any:
        try:
            return await getattr(handle, method).remote(*arguments)
        except serve.exceptions.BackPressureError:
            raise RefusedError(503, "the model has too many requests; try again later", 1) from None
        except (ray.exceptions.RayActorError, serve.exceptions.RayServeException):
            raise RefusedError(503, "the model's process has ended and is started again; try again", 1) from None

    return call


@serve.deployment
@serve.ingress()
class Ingress:
    """The process that answers requests: checks limits, and decodes and resizes images for the models' processes."""

    def __init__(
        self, arguments: ServeArguments, captioners: dict[str, DeploymentHandle], *, has_token: bool, is_local: bool
    ) -> None:
        prepare_replica(is_local)
        # The token is not an argument, because Ray's dashboard shows the arguments of deployments to everybody.
        token = server_token(CLUSTER, insecure=not has_token)
        self.app_of_requests = make_app(
            {name: ray_captioners(handle) for name, handle in captioners.items()}, arguments, token
        )

    async def stop(self) -> None:
        """See `Server.stop`."""
        await self.app_of_requests.state.server.stop()

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application. Ray Serve calls this method by its name."""
        return self.app_of_requests


def application(args: dict[str, object]) -> serve.Application:
    """The application of a RayService (`import_path: raycap.jobs.serve.deployments:application`).

    args: the fields of `ServeArguments`. Raises ValueError if they are invalid, and UserError for a bad token or model.
    """
    arguments = ServeArguments.model_validate(args)
    server_token(CLUSTER, arguments.insecure)
    return build(arguments, named_models(arguments), is_local=False)


def build(arguments: ServeArguments, models: Iterable[NamedModel], *, is_local: bool) -> serve.Application:
    """The Ray Serve application of a server. is_local: True if this process has started Ray."""
    gpus = arguments.gpus
    if gpus is None:
        gpus = float(ray.cluster_resources().get("GPU", 0) > 0)
    size = arguments.batch_size
    scaling: Values = {"num_replicas": arguments.replicas}
    if not isinstance(arguments.replicas, int):
        least, most = arguments.replicas
        # Two batches per process, so that one waits while the other is captioned.
        limits = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": 2 * size}
        scaling = {"autoscaling_config": limits}
    captioner = CaptionerDeployment.options(  # type: ignore[attr-defined]
        # More than Ray's default of 5, with which a batch would never be full.
        max_ongoing_requests=4 * size,
        ray_actor_options={"num_cpus": CAPTIONER_CPUS, "num_gpus": gpus},
        graceful_shutdown_timeout_s=SHUTDOWN_S,
        **scaling,
    )
    captioners = {
        model.name: captioner.options(name=f"captioner-{model.name}").bind(model, arguments, gpus, is_local=is_local)
        for model in models
    }
    ingress = Ingress.options(  # type: ignore[attr-defined]
        name="ingress",
        num_replicas=1,  # because its queue and counters are those of the whole server
        max_ongoing_requests=arguments.limits.queue + SPARE_REQUESTS,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        graceful_shutdown_timeout_s=SHUTDOWN_S,
    )
    has_token = server_token(CLUSTER, insecure=True) is not None
    return ingress.bind(arguments, captioners, has_token=has_token, is_local=is_local)


def needed_cpus(arguments: ServeArguments) -> int:
    """The number of CPUs that the server needs if Ray runs only on this machine."""
    return math.ceil(INGRESS_CPUS + CAPTIONER_CPUS * arguments.num_captioners)


def prepare_replica(is_local: bool) -> None:
    """Sets up the log of a Ray Serve process. If Ray runs only on this machine, also restricts its port to loopback.

    Ray Serve opens a port of each process on all interfaces and unpickles what arrives there. Ray has no setting for
    the interface, so this function replaces the one with which Ray Serve opens the port later.
    """
    configure_logging()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if is_local:
        add_port_of_ray = replica.add_port_to_grpc_server

        def add_loopback_port(server: object, address: str) -> int:
            return add_port_of_ray(server, address.replace("[::]", "127.0.0.1"))

        replica.add_port_to_grpc_server = add_loopback_port


def require_unused() -> None:
    """Raises UserError if Ray Serve already has an application on the cluster.

    All applications share one port, and stopping this server would also stop the others.
    """
    for name in serve.status().applications:
        raise UserError(
            f"Ray Serve already runs on this cluster, with the application {shown(name)}; stop it with `serve "
            "shutdown`, or serve on another cluster"
        )


def start(arguments: ServeArguments, models: Iterable[NamedModel], host: str, port: int, *, is_local: bool) -> None:
    """Starts the server on a Ray that has been started. Raises JobFailedError if it does not start.

    is_local: True if this process has started Ray.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    limits = arguments.limits
    options = HTTPOptions(host=host, port=port, request_timeout_s=2 * (limits.body_s + limits.answer_s))
    target = build(arguments, models if is_local else [each.sent() for each in models], is_local=is_local)
    serve.start(proxy_location="HeadOnly", http_options=options, logging_config=LOGGING)
    try:
        serve.run(target, name=APP, route_prefix="/", logging_config=LOGGING)
    except RuntimeError as error:
        raise JobFailedError(f"the server did not start: {one_line(error)}; Ray's logs have the reason") from error


def wait(limits: Limits) -> None:
    """Waits until the application has ended.

    A signal raises KeyboardInterrupt, after requests in progress have been answered. New ones are refused meanwhile.
    """
    try:
        while APP in serve.status().applications:
            time.sleep(STATUS_S)
    except KeyboardInterrupt:
        with suppress(serve.exceptions.RayServeException, ray.exceptions.RayError, TimeoutError):
            serve.get_app_handle(APP).stop.remote().result(timeout_s=limits.body_s + limits.answer_s)
        raise


def stop() -> None:
    """Stops Ray Serve with the application, if it has been started."""
    serve.shutdown()
