"""Retrains a model in five steps: lease, new data, training, comparison, decision.

Several processes may call `retrain` at once, because the lease lets only one of them work. The champion changes with
the last write of the fifth step (`ChampionStore.commit`). If a process is killed earlier, the next call deletes its
files, resumes its training run and repeats the other steps. Every write needs the lease's token, so a suspended process
that has lost the lease cannot write when it continues.

The data folder is listed once, in the second step, and the later steps use this listing. Files that are added later are
new data for the next call.

In the tracker, the registered model has the alias `champion` at the champion's version. Every call sets the alias, so
that a call after an outage corrects it.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from raycap.models.config import Values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.content_keys import ENTRIES
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import data_root
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import StoredBundle, bundle_digests
from raycap.pipeline.evaluation.comparison.bootstrap import Difference, paired_difference
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.retrain.champion import (
    LEASE,
    LISTING,
    BundleRecord,
    ChampionState,
    ChampionStore,
    Change,
    DataRecord,
    Decision,
    HeldOut,
    Verdict,
    compare,
    find_held_out,
    held_out_split,
    list_data,
    new_keys,
    with_keys,
)
from raycap.pipeline.runs.check import check_data
from raycap.pipeline.storage.lease import Lease, LeaseRecord, LostLeaseError, take_lease
from raycap.pipeline.storage.path import StoragePath, try_rights
from raycap.pipeline.storage.tables import from_bytes, to_bytes
from raycap.pipeline.tracking.mlflow_client import experiment_of, public_uri, reason_of, tracking_client

logger = logging.getLogger(__name__)

MAX_FINDINGS_SHOWN = 5
HELD_OUT = "held out"  # the name of the split on which models are compared
ALIAS = "champion"  # the tracker's alias for the champion's version
FoundData = tuple[Dataset, dict[str, str]]  # the result of `pipeline.data.reading.find_data`


class Work(Protocol):
    """The steps of a retraining that run on a cluster."""

    def train(self, config: RunConfig, data: FoundData) -> Path:
        """Trains a model of this configuration on the data. If a run of it exists, resumes that run.

        Returns the local folder of its bundle, which has the run's id as its name.
        """

    def evaluate(self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig) -> SplitScores:
        """Captions and scores the images `part` with a bundle. files: the SHA-256 of each file of the bundle."""


class Scores(NamedTuple):
    """Captions and CIDEr-D of both models on the same images. If there is no champion, only the challenger's."""

    challenger: SplitScores
    champion: SplitScores | None
    difference: Difference | None


class NewData(NamedTuple):
    """The result of the second step: the data set, its listing and its numbers."""

    found: FoundData
    snapshot: pa.Table  # the listing with content keys
    record: DataRecord


def retrain(config: RunConfig, work: Work) -> int:
    """Trains a model if there is new data, and makes it the champion if it is better than the present champion.

    Returns 0, or 1 for bad data or a lost lease. Raises UserError for errors in the configuration.
    """
    held_out_split(config)  # raises UserError before anything is written
    return _act_under_lease(config, lambda retraining: retraining.execute(work))


def rollback(config: RunConfig) -> int:
    """Restores the previous champion and returns the exit code. Takes the lease, which stops a running retraining."""
    if not ChampionStore(config.storage_place, config.name).read().before:
        raise UserError(f"--rollback: {config.name} has no earlier champion in {config.storage.uri}; nothing changed")
    return _act_under_lease(config, Retraining.roll_back, by_force=True)


def _act_under_lease(config: RunConfig, act: Callable[[Retraining], int], *, by_force: bool = False) -> int:
    """Takes the lease, calls `act` and returns its exit code.

    If another process has the lease, returns 0 without calling `act`. If the lease is lost during the call, returns 1.
    Raises StorageError if the storage does not support conditional writes.
    """
    store = ChampionStore(config.storage_place, config.name)
    path, seconds = store.folder / LEASE, config.retrain.lease_seconds
    if path.is_remote:  # a server that ignores conditions would give the lease to two processes
        try_rights(store.folder)
    # A new token must be larger than every earlier one, even after lease.json or champion.json was deleted.
    state = store.read()
    above = state.token or max(store.orphans(state).values(), default=0)
    lease = take_lease(path, seconds, above=above, by_force=by_force)
    if isinstance(lease, LeaseRecord):
        logger.info(f"lease     held by {lease}; nothing to do here")
        return 0
    label = "lease:   " if by_force else "step 1/5  lease:"
    logger.info(f"{label} {path}, token {lease.token}")
    try:
        with lease:
            return act(Retraining(config, store, lease))
    except LostLeaseError as error:
        logger.info(f"stopped   {error}; nothing was {'rolled back' if by_force else 'promoted'}")
        return 1


class Retraining:
    """One retraining or rollback under one lease."""

    def __init__(self, config: RunConfig, store: ChampionStore, lease: Lease) -> None:
        self.config, self.store, self.lease = config, store, lease
        self.state = store.fence(lease)
        store.remove_orphans(self.state, lease)

    def execute(self, work: Work) -> int:
        """Performs steps 2 to 5 of a retraining. Returns the exit code."""
        try:
            root, name, folder = data_root(self.config), self.state.snapshot, self.store.folder
            before = None if name is None else from_bytes((folder / name).read_bytes(), LISTING, name)
            listing = list_data(self.config, root)
            change = compare(listing, before)
            logger.info(f"step 2/5  data: {listing.num_rows} files in {root}: {change}")
            if before is not None and not change.added and not change.changed:
                return self._nothing_new(change)
            data = self._read_data(root, listing, before, change)
            if data is None:
                logger.info("the new data cannot be trained on (`raycap check` lists all errors); nothing was changed")
                return 1
            if not data.record.new_images and data.record.fingerprint == self.state.fingerprint:
                return self._nothing_new(change)
            split = self.state.held_out
            file = None if split is None else (folder / split).read_bytes()
            held = find_held_out(file, data.found[0], self.config)
        except UserError as error:
            if self.state.snapshot is None:
                raise
            logger.info(f"bad data  {error}")  # the same configuration worked before, so the data is at fault
            return 1
        bundle = self._train(work, data.found)
        self.lease.check()
        logger.info(f"step 4/5  comparison on {len(held.part)} held-out images")
        name = bundle.relative_to(self.config.working_path).as_posix()
        challenger = BundleRecord(bundle=name, files=bundle_digests(bundle), run_id=bundle.name)
        scores = self._compare(work, challenger, held.part)
        self.lease.check()
        logger.info("step 5/5  decision")
        return self._decide(data, held, bundle, challenger, scores)

    def _read_data(self, root: str, listing: pa.Table, before: pa.Table | None, change: Change) -> NewData | None:
        """Reads and checks the listed data. If the data has errors, logs the first of them and returns None."""
        config = self.config
        # Images in the previous listing need no check, because the retraining that wrote the listing checked them.
        known = None if before is None else before["key"].drop_null()
        findings = check_data(config, known, listing.select(ENTRIES.names))
        errors = [finding for finding in findings.findings if finding.kind == "error"]
        for finding in errors[:MAX_FINDINGS_SHOWN]:
            logger.info(f"bad data  {finding.text}")
        if errors or findings.data is None:
            return None
        dataset, unreadable = findings.data
        dataset = dataset.with_words(config.data.tokenizer)
        usable = dataset.readable()
        num_new = new_keys(usable, before)
        logger.info(f"          {num_new} images are new; they and their captions passed the check")
        record = DataRecord(
            root=root, files=change, new_images=num_new, images=len(usable), fingerprint=usable.fingerprint()
        )
        return NewData((dataset, unreadable), with_keys(listing, usable), record)

    def _nothing_new(self, change: Change) -> int:
        """Logs that no data is new, and returns 0. Sets the tracker's alias, in case an outage prevented it before."""
        logger.info(f"nothing new since decision {self.state.number} (files: {change}); the champion stays")
        update_tracker(self.config, self.state)
        return 0

    def _train(self, work: Work, data: FoundData) -> Path:
        """Trains from the champion's weights, or from scratch if there is no champion. Returns the local bundle."""
        config, champion = self.config, self.state.champion
        if champion is None:
            logger.info("step 3/5  training: there is no champion yet, the first model becomes it")
            return work.train(config, data)
        bundle = config.storage_place / champion.bundle
        logger.info(f"step 3/5  training from the champion's weights, {bundle}")
        return work.train(config.model_copy(update={"init_from": bundle.uri}), data)

    def _compare(self, work: Work, challenger: BundleRecord, part: Dataset) -> Scores:
        """Scores both models on the held-out images. Raises OSError if they captioned different images or none."""
        config = self.config

        def score(bundle: BundleRecord) -> SplitScores:
            return work.evaluate(config.storage_place / bundle.bundle, bundle.files, part, config)

        ours = score(challenger)
        theirs = None if self.state.champion is None else score(self.state.champion)
        values = ours.cider_by_image
        has_same_images = theirs is None or values.keys() == theirs.cider_by_image.keys()
        if not values or not has_same_images:
            raise OSError("some held-out images could be read for one model and not for the other; call again")
        if theirs is None:
            return Scores(ours, None, None)
        difference = paired_difference(
            [list(values.values())],
            [list(theirs.cider_by_image.values())],
            confidence=config.retrain.confidence,
            seed=config.seed,
        )
        return Scores(ours, theirs, difference)

    def _decide(self, data: NewData, held: HeldOut, bundle: Path, challenger: BundleRecord, scores: Scores) -> int:
        """Writes the files that the decision references. Then champion.json makes the decision effective."""
        state, store, token = self.state, self.store, f"t{self.lease.token:06d}"
        verdict, reason = self._verdict(scores)
        is_better = verdict != "kept"
        champion = store.copy_bundle(bundle, challenger, self.lease) if is_better else state.champion
        snapshot = store.write_file(f"snapshots/{token}.parquet", to_bytes(data.snapshot), self.lease)
        split = state.held_out or store.write_file(f"held-out/{token}.parquet", held.file, self.lease)
        sides = {"champion": scores.champion, "challenger": scores.challenger}
        decision = {
            "decision": verdict,
            "reason": reason,
            "run": challenger.run_id,
            "data": data.record,
            "held_out": split,
            "num_compared": len(held.part),
            "scores": {name: _cider(side) for name, side in sides.items() if side is not None},
            "difference": scores.difference,
        }
        after = {
            "champion": champion,
            "before": state.bundles if is_better else state.before,
            "snapshot": snapshot,
            "fingerprint": data.record.fingerprint,
            "held_out": split,
        }
        return self._commit(decision, after)

    def _verdict(self, scores: Scores) -> tuple[Verdict, str]:
        """The verdict and its reason in one sentence."""
        required, difference, value = self.config.retrain, scores.difference, _cider(scores.challenger)
        if difference is None or scores.champion is None:
            return "first", f"there was no champion; the first model, CIDEr-D {value:.4f}, becomes it"
        interval = f"{100 * required.confidence:g} % interval [{difference.low:+.4f}, {difference.high:+.4f}]"
        numbers = (
            f"CIDEr-D {value:.4f} against the champion's {_cider(scores.champion):.4f}: "
            f"{difference.mean:+.4f}, {interval}"
        )
        if difference.low > required.margin:
            return "promoted", f"{numbers} is above the margin {required.margin:g}"
        return "kept", f"{numbers} is not above the margin {required.margin:g}; the champion stays"

    def _commit(self, fields: Values, changes: Values) -> int:
        """Writes the record of a decision, and then champion.json. Returns the exit code.

        fields: fields of `Decision` besides those that are set here. changes: the fields of champion.json that change.
        """
        config, state, token, number = self.config, self.state, self.lease.token, self.state.number + 1
        file = f"decisions/{number:06d}-t{token:06d}.json"
        after = state.model_copy(update=changes | {"number": number, "decision": file, "decided": token})
        common = {
            "name": config.name,
            "number": number,
            "token": token,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "champion": after.champion,
            "champion_before": state.champion,
            "snapshot": after.snapshot,
            "previous": state.decision,
        }
        decision = Decision.model_validate(common | fields)
        self.store.write_file(file, decision.model_dump_json(exclude_unset=True, indent=1).encode(), self.lease)
        self.store.commit(after, self.lease)
        logger.info(f"decision  {decision.decision}: {decision.reason}")
        update_tracker(config, after)
        logger.info(f"champion  {config.storage_place / decision.champion.bundle}")
        logger.info(f"record    {self.store.folder / file}")
        return 0

    def roll_back(self) -> int:
        """Makes the previous champion the champion again. Returns the exit code."""
        state = self.state
        if not state.before or state.champion is None:
            raise UserError(f"--rollback: {self.config.name} has no earlier champion; nothing changed")
        former, run_id = state.before[-1], state.champion.run_id
        StoredBundle(self.config.storage_place / former.bundle, former.files).fetch()  # raises OSError if damaged
        reason = f"requested; the champion of run {run_id} is replaced by that of {former.run_id}"
        decision = {"decision": "rolled back", "reason": reason, "run": run_id}
        return self._commit(decision, {"champion": former, "before": state.before[:-1]})


def _cider(scores: SplitScores) -> float:
    return float(scores.values["CIDEr-D"] or 0)


def update_tracker(config: RunConfig, state: ChampionState) -> None:
    """Sets the tracker's alias to the champion's model version. If the tracker fails, only logs one line."""
    if not config.tracking.enabled or state.champion is None:
        return
    try:
        client = tracking_client(config)
        runs = client.search_runs([experiment_of(client, config)], f"tags.`raycap.run_id` = '{state.champion.run_id}'")
        # The child runs of stages have the same tag, so the run without a parent is chosen.
        run = next((run for run in runs if "mlflow.parentRunId" not in run.data.tags), None)
        versions = client.search_model_versions(f"run_id = '{run.info.run_id}'") if run else []
        if versions:
            client.set_registered_model_alias(config.name, ALIAS, str(versions[0].version))
        elif any(ALIAS in found.aliases for found in client.search_registered_models(f"name = '{config.name}'")):
            # The tracker has no version of the champion until `raycap sync` sends the model. The alias is removed,
            # because it names another model.
            client.delete_registered_model_alias(config.name, ALIAS)
    except Exception as error:  # a failing tracker must not fail the decision
        address, reason = public_uri(config), reason_of(error)
        logger.info(f"tracker   {address} could not be updated ({reason}); the next call tries again")
