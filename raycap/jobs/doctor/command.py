"""`raycap doctor`: checks what this machine or a cluster can run, and gives a remedy for each problem.

The nodes of a cluster are asked by tasks of Ray. With a dashboard's address, a job on the cluster does this.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from raycap.jobs.cluster import cluster_address, connect, stage_bundles
from raycap.jobs.doctor.cluster_checks import check_cluster, jobs_server
from raycap.jobs.doctor.cluster_facts import cluster_facts
from raycap.jobs.doctor.damage import find_damaged_files
from raycap.jobs.doctor.finding import Finding
from raycap.jobs.doctor.machine_checks import check_machine
from raycap.jobs.options import Set
from raycap.jobs.submit import Job, start
from raycap.pipeline.cluster.capacity import Resources
from raycap.pipeline.cluster.jobs_api import JobsServer, UnreachableError
from raycap.pipeline.cluster.submission import used_variables
from raycap.pipeline.config.load import parse_config, read_values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.shipped import named_config
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.log import configure_logging, unchanged_level
from raycap.pipeline.runtime.names import printable
from raycap.pipeline.search.trials import DAMAGE_RULE
from raycap.pipeline.storage.cache import REWARD_INDEXES
from raycap.pipeline.storage.path import cache_folder, storage_path

JOB_S, POLL_S = 240.0, 1.0  # the deadline of the job that asks the nodes


@dataclass(frozen=True)
class Subject:
    """What is checked: nothing in particular, a run, or a search."""

    path: Path | None = None
    overrides: Sequence[str] = ()
    config: RunConfig | None = None  # for a search, the one that it starts from
    requests: Mapping[str, Sequence[Resources]] = field(default_factory=dict)  # the resources of each process, by stage
    is_search: bool = False


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
    storage: Annotated[
        bool, typer.Option("--storage", help="Read all files of CONFIG's storage and find damaged ones.")
    ] = False,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of lines.")] = False,
) -> int:
    """Check what this machine or a cluster can run.

    Each line names a capability and, where it is missing, the remedy. The exit code is 1 when CONFIG cannot run. With
    an address, every node of the cluster is asked, too. With --storage, the files are read instead, and the exit code
    is 1 when one is damaged.

    Example: raycap doctor demo
    """
    findings: list[Finding] = []
    subject = _read_subject(config, set_ or ())
    address = cluster_address(address)
    for finding in _examine_files(subject) if storage else _examine(subject, address):
        findings.append(finding)
        if not print_json:
            print(printable(finding.line))
    failed = list(dict.fromkeys(finding.name for finding in findings if finding.level == "fail"))
    if print_json:
        report = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=1))
    elif not storage:
        name = str(config) if config is not None else "raycap"
        print(f"{name} cannot run here: {', '.join(failed)}" if failed else f"{name} can run here")
    return 1 if failed else 0


def _examine_files(subject: Subject) -> Iterator[Finding]:
    """A finding for each damaged file of a storage and of the rewards' indexes of this machine, or that there is none.

    Raises UserError without a configuration.
    """
    if subject.config is None:
        raise UserError("--storage reads the storage of a configuration; give its file")
    place, indexes = subject.config.storage_place, storage_path(cache_folder() / REWARD_INDEXES)
    damages = list(find_damaged_files(place, DAMAGE_RULE))
    damages += [(damage, "it is built again when it is used") for damage, _ in find_damaged_files(indexes)]
    yield from (Finding("files", "fail", damage, remedy) for damage, remedy in damages)
    if not damages:
        yield Finding("files", "ok", f"no file of {place} is damaged")


def _read_subject(path: Path | None, overrides: Sequence[str]) -> Subject:
    """The run or the search in a YAML file."""
    if path is None:
        return Subject()
    values = read_values(path, overrides)
    if "space" in values or "rows" in values:  # only the file of a search has these keys
        from raycap.pipeline.search.spec import load_search

        search = load_search(path, overrides)
        trial = [search.bundle] * search.config.resources.workers
        requests = {"features": stage_bundles(search.base, "features"), "a trial": trial}
        return Subject(path, overrides, search.base, requests, is_search=True)
    config = parse_config(values)
    requests = {stage: stage_bundles(config, stage) for stage in ("features", "training")}
    return Subject(path, overrides, config, requests)


def _examine(subject: Subject, address: str | None) -> Iterator[Finding]:
    """Runs all checks. With an address, a run computes on that cluster, not on this machine."""
    names = set()
    for finding in check_machine(subject.config, on_cluster=address is not None):
        names.add(finding.name)
        yield finding
    if address is None:
        return
    if not _is_dashboard(address):
        yield from _join(subject, address)
        return
    reachable = jobs_server(address)
    yield reachable
    if reachable.level == "fail":
        return
    if subject.path is None:
        yield Finding("nodes", "ok", "not asked", "give a configuration to check each of them")
        return
    # The job also checks the machine of the head, whose facts are among those of the nodes.
    yield from (finding for finding in _run_job(subject, subject.path, address) if finding.name not in names)


def _is_dashboard(address: str) -> bool:
    """Whether the address is that of a jobs server, possibly without http://, and not one that Ray joins."""
    if "://" in address:
        return True
    try:
        _ = JobsServer(address).ray_version
    except UnreachableError:
        return False
    except UserError:  # it refuses the token
        return True
    return True


def _join(subject: Subject, address: str) -> Iterator[Finding]:
    """Joins a cluster and checks its nodes."""
    try:
        connect(address)
    except Exception as error:  # Ray raises various types
        remedy = "give the address of a Ray head that this machine reaches, or of its dashboard (http://head:8265)"
        yield Finding("cluster", "fail", f"{address} cannot be joined: {' '.join(str(error).split())}", remedy)
        return
    facts = cluster_facts(subject.config)
    yield from check_cluster(facts, subject.config, subject.requests, scores_on_nodes=subject.is_search)


def _run_job(subject: Subject, path: Path, address: str) -> Sequence[Finding]:
    """The findings of this command as a job on the cluster, or one finding with the reason why there are none."""
    arguments = ["--json", *(word for override in subject.overrides for word in ("--set", override))]
    job = Job("doctor", [str(path), *arguments], secrets=used_variables(path))
    try:
        with unchanged_level():
            configure_logging(logging.ERROR)
            server, job_id = start(job, address)
        deadline = time.monotonic() + JOB_S
        while not (info := server.job(job_id)).status.is_terminal():
            if time.monotonic() > deadline:
                server.stop(job_id)
                reason = f"job {job_id} has not ended within {JOB_S:g} s: {info.message or info.status.value}"
                return [Finding("nodes", "fail", reason, "look at the cluster's dashboard")]
            time.sleep(POLL_S)
        return _findings_in(server.logs(job_id), job_id)
    except (UserError, UnreachableError) as error:
        return [Finding("nodes", "fail", f"cannot be asked: {error}")]


def _findings_in(log: str, job_id: str) -> list[Finding]:
    """The findings in the log of a job."""
    start = log.find('{\n "ok": ')
    if start < 0:
        lines = log.strip().splitlines() or ["no output"]
        return [Finding("nodes", "fail", f"job {job_id} could not ask them: {lines[-1]}", "look at the job's log")]
    report, _ = json.JSONDecoder().raw_decode(log[start:])
    return [Finding(**finding) for finding in report["findings"]]
