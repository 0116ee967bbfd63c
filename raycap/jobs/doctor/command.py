"""`raycap doctor`: checks what this machine or a cluster can run, and gives a remedy for each problem.

The nodes of a cluster are asked by tasks of Ray. With a dashboard's address, this command runs there as a job.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.doctor.checks import Finding, ScarceError, check_machine, find
from raycap.jobs.doctor.nodes import check_cluster
from raycap.jobs.options import Set
from raycap.jobs.submit import Job, submit
from raycap.pipeline.cluster.capacity import Resources
from raycap.pipeline.cluster.jobs_api import JobsServer, UnreachableError
from raycap.pipeline.cluster.start import cluster_address, connect, stage_bundles
from raycap.pipeline.cluster.submission import used_variables
from raycap.pipeline.config.load import parse_config, read_values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.shipped import named_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.log import configure_logging, unchanged_level
from raycap.pipeline.runtime.names import one_line, printable
from raycap.pipeline.search.spec import load_search

Requests = Mapping[str, Sequence[Resources]]  # the resources of each process, by stage


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="The YAML file to run here, or the name of a shipped one.", metavar="[CONFIG]", callback=named_config
        ),
    ] = None,
    set_: Set = None,
    address: Annotated[
        str | None, typer.Option(help="A cluster's dashboard (http://head:8265), or what `run --address` takes.")
    ] = None,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of lines.")] = False,
) -> int:
    """Check what this machine or a cluster can run.

    Each line names a capability and, where it is missing, the remedy. The exit code is 1 when CONFIG cannot run. With
    an address, every node of the cluster is asked; with a dashboard's, a job there asks them.

    Example: raycap doctor demo
    """
    run, requests = (None, {}) if config is None else _read(config, set_ or ())
    address = cluster_address(address)
    server = None if address is None else _dashboard(address)
    findings: list[Finding] = []
    for finding in _examine(run, requests, address) if server is None else [_cluster(server)]:
        findings.append(finding)
        if not print_json:
            print(printable(finding.line))
    failed = list(dict.fromkeys(finding.name for finding in findings if finding.level == "fail"))
    if server is not None and config is not None and not failed:
        return _submit(config, set_ or (), server, print_json)
    if print_json:
        report = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=1))
    else:
        name = str(config) if config is not None else "raycap"
        print(f"{name} cannot run here: {', '.join(failed)}" if failed else f"{name} can run here")
    return 1 if failed else 0


def _read(path: Path, overrides: Sequence[str]) -> tuple[RunConfig, Requests]:
    """The run in a YAML file, or the one from which a search starts, and what its stages ask for."""
    values = read_values(path, overrides)
    if "space" in values or "rows" in values:  # only the file of a search has these keys
        search = load_search(path, overrides)
        trial = [search.bundle] * search.config.resources.workers
        return search.base, {"features": stage_bundles(search.base, "features"), "a trial": trial}
    config = parse_config(values)
    return config, {stage: stage_bundles(config, stage) for stage in ("features", "training")}


def _examine(config: RunConfig | None, requests: Requests, address: str | None) -> Iterator[Finding]:
    """Checks this machine, and the nodes of the cluster that it joins."""
    yield from check_machine(config, on_cluster=address is not None)
    if address is None:
        return
    try:
        connect(address)
    except Exception as error:  # Ray raises various types
        remedy = "give the address of a Ray head that this machine reaches, or of its dashboard (http://head:8265)"
        yield Finding("cluster", "fail", f"{address} cannot be joined: {one_line(error)}", remedy)
        return
    yield from check_cluster(config, requests)


def _dashboard(address: str) -> JobsServer | None:
    """The jobs server at an address, possibly without http://; None for an address that Ray joins."""
    if address == "auto":
        return None
    server = JobsServer(address)
    try:
        _ = server.ray_version
    except UnreachableError:
        return server if "://" in address else None
    except UserError:  # it refuses the token
        pass
    return server


def _cluster(server: JobsServer) -> Finding:
    remedy = "check the address, and give the cluster the Ray of this machine and RAY_AUTH_MODE=token"
    return find("cluster", lambda: _version(server), remedy)


def _version(server: JobsServer) -> str:
    """Whether the jobs server answers, accepts the token, and has the Ray version installed here."""
    remote, local = server.ray_version, importlib.metadata.version("ray")
    text = f"{server.address}, Ray {remote}, {'token accepted' if server.headers else 'no token needed'}"
    if remote != local:
        is_close = remote.split(".")[:2] == local.split(".")[:2]
        raise (ScarceError if is_close else UserError)(f"{text}; here Ray {local}")
    if not server.headers:
        raise ScarceError(f"{text}: everybody who can reach the cluster can run code in it")
    return text


def _submit(path: Path, overrides: Sequence[str], server: JobsServer, print_json: bool) -> int:
    """Runs this command as a job on the cluster, whose output is printed. Returns its exit code."""
    arguments = [str(path), *(word for override in overrides for word in ("--set", override))]
    job = Job("doctor", [*arguments, *(["--json"] if print_json else [])], secrets=used_variables(path))
    with unchanged_level():
        configure_logging(logging.WARNING)
        return submit(job, server.address)
