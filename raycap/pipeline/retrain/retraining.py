"""Retraining in five steps: lease, new data, training, comparison, decision. Calls may overlap.

Nothing changes before the last write of the fifth step (`ChampionStore.commit`). If a process is killed earlier, the
next call deletes its files, resumes its training run and repeats the other steps. Every write needs the lease's token,
so a process that was suspended until another one took the lease cannot write after it continues.

The data folder is listed once, in the second step. Training, comparison and decision get what it found as a value. What
is added to the folder later is new data for the next call.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from raycap.models.config import Values
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.data.content_keys import ENTRIES
from raycap.pipeline.data.dataset import Dataset
from raycap.pipeline.data.reading import data_root
from raycap.pipeline.errors import UserError
from raycap.pipeline.evaluation.captioning.bundle import bundle_digests
from raycap.pipeline.evaluation.comparison.bootstrap import RESAMPLES, Difference, paired_difference
from raycap.pipeline.evaluation.results import SplitScores
from raycap.pipeline.retrain.champion import LEASE, BundleRecord, ChampionStore, DataRecord, Decision, Verdict
from raycap.pipeline.retrain.listing import (
    LISTING,
    Change,
    HeldOut,
    compare,
    find_held_out,
    held_out_split,
    list_data,
    new_keys,
    with_keys,
)
from raycap.pipeline.retrain.page import decision_page
from raycap.pipeline.retrain.tracker import update_tracker
from raycap.pipeline.runs.check import check_data
from raycap.pipeline.runtime.log import Decorations
from raycap.pipeline.storage.lease import Lease, LeaseRecord, LostLeaseError, take_lease
from raycap.pipeline.storage.path import StoragePath, try_rights
from raycap.pipeline.storage.tables import from_bytes, to_bytes

logger = logging.getLogger(__name__)

MAX_FINDINGS_SHOWN = 5
HELD_OUT = "held out"  # the name of the split on which models are compared


class Trained(NamedTuple):
    """A finished run and its bundle, a local folder."""

    run_id: str
    bundle: Path


FoundData = tuple[Dataset, dict[str, str]]  # the result of `pipeline.data.reading.find_data`


class Work(Protocol):
    """The steps of a retraining that run on a cluster."""

    def train(self, config: RunConfig, data: FoundData) -> Trained:
        """Trains a configuration on these data, or resumes the run when it exists."""

    def evaluate(self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig) -> SplitScores:
        """CIDEr-D of a bundle on the images HELD_OUT; `files` gives the digests that its files must have."""


class HeldOutScores(NamedTuple):
    """Captions and CIDEr-D of both models on the same images; `champion` and `difference` may be None."""

    challenger: SplitScores
    champion: SplitScores | None
    difference: Difference | None


def retrain(config: RunConfig, work: Work) -> int:
    """Trains a model if there are new data, and makes it the champion if it is better than the present one.

    Returns 0, or 1 for bad data or a lost lease. Raises UserError for errors in the configuration.
    """
    held_out_split(config)  # raises before anything is written
    return _act_under_lease(config, lambda retraining: retraining.execute(work))


def rollback(config: RunConfig) -> int:
    """Restores the previous champion; returns the exit code. It takes the lease from a running retraining by force."""
    if not ChampionStore(config.storage_place, config.name).read().before:
        raise UserError(f"--rollback: {config.name} has no earlier champion in {config.storage.uri}; nothing changed")
    return _act_under_lease(config, _Retraining.roll_back, by_force=True)


def _act_under_lease(config: RunConfig, act: Callable[[_Retraining], int], *, by_force: bool = False) -> int:
    """Takes the lease, calls `act` and returns its exit code.

    Returns 0 without a call when another process has the lease, and 1 when the lease is lost during the call. Raises
    StorageError if the storage has no conditional writes.
    """
    store = ChampionStore(config.storage_place, config.name)
    path, seconds = store.folder / LEASE, config.retrain.lease_seconds
    if path.is_remote:  # a server that ignores conditions would give the lease to two processes
        try_rights(store.folder)
    # a new token must be larger than champion.json's, even after the lease's file was deleted
    lease = take_lease(path, seconds, above=store.read().token, by_force=by_force)
    if isinstance(lease, LeaseRecord):
        logger.info(f"lease     held by {lease}; nothing to do here")
        return 0
    logger.info(f"{'lease:   ' if by_force else 'step 1/5  lease:'} {path}, token {lease.token}")
    try:
        with lease:
            return act(_Retraining(config, store, lease))
    except LostLeaseError as error:
        logger.info(f"stopped   {error}; nothing was {'rolled back' if by_force else 'promoted'}")
        return 1


class _NewData(NamedTuple):
    """The result of the second step."""

    found: FoundData
    snapshot: pa.Table  # the listing with content keys
    record: DataRecord


class _Retraining:
    """One retraining or rollback under one lease."""

    def __init__(self, config: RunConfig, store: ChampionStore, lease: Lease) -> None:
        self.config, self.store, self.lease = config, store, lease
        self.state = store.fence(lease)
        store.remove_orphans(self.state, lease)

    def execute(self, work: Work) -> int:
        """Steps 2 to 5 of a retraining; returns the exit code."""
        state = self.state
        try:
            data = self._new_data()
        except UserError as error:
            if state.snapshot is None:
                raise
            logger.info(f"bad data  {error}")  # the same configuration worked before, so the data is at fault
            return 1
        if isinstance(data, int):
            return data
        held = self._held_out(data.found[0])
        if held.leaked:
            logger.info(
                f"bad data  {held.leaked} images of the fixed held-out split are now in training or validation; take "
                f"them out, or start over without {self.store.folder}"
            )
            return 1
        trained = self._train(work, data.found)
        self.lease.check()
        logger.info(f"step 4/5  comparison on {len(held.part)} held-out images")
        name = trained.bundle.relative_to(self.config.working_path).as_posix()
        challenger = BundleRecord(bundle=name, files=bundle_digests(trained.bundle), run_id=trained.run_id)
        models = {"challenger": challenger} | ({"champion": state.champion} if state.champion else {})
        found = {
            model: work.evaluate(self.config.storage_place / record.bundle, record.files, held.part, self.config)
            for model, record in models.items()
        }
        scores = compare_scores(self.config, found["challenger"], found.get("champion"))
        self.lease.check()
        logger.info("step 5/5  decision")
        return self._decide(data, held, trained.bundle, challenger, scores)

    def _new_data(self) -> _NewData | int:
        """The present data and how they differ from those of the last decision.

        Returns the exit code of the retraining if it ends here, because nothing is new or the data has errors.
        """
        config, root = self.config, data_root(self.config)
        listing = list_data(config, root)
        stored = self.state.snapshot
        before = from_bytes(self.store.read_file(stored), LISTING, stored.name) if stored else None
        change = compare(listing, before)
        logger.info(f"step 2/5  data: {listing.num_rows} files in {root}: {change}")
        if before is not None and not change.added and not change.changed:
            return self._nothing_new(change)
        # the images in the previous listing were checked by the retraining that wrote it
        known = None if before is None else before["key"].drop_null()
        findings = check_data(config, known, listing.select(ENTRIES.names))
        for finding in [finding for finding in findings.findings if finding.kind == "error"][:MAX_FINDINGS_SHOWN]:
            logger.info(f"bad data  {finding.text}")
        if not findings.ok or findings.data is None:
            logger.info("the new data cannot be trained on (`raycap check` lists all errors); nothing was changed")
            return 1
        dataset, unreadable = findings.data
        dataset = dataset.with_words(config.data.tokenizer)
        usable = dataset.readable()
        num_new, fingerprint = new_keys(usable, before), usable.fingerprint()
        logger.info(f"          {num_new} images are new; they and their captions passed the check")
        if not num_new and fingerprint == self.state.fingerprint:
            return self._nothing_new(change)
        record = DataRecord(root=root, files=change, new_images=num_new, images=len(usable), fingerprint=fingerprint)
        return _NewData((dataset, unreadable), with_keys(listing, usable), record)

    def _nothing_new(self, change: Change) -> int:
        """Ends a retraining without new data, and sends the tracker what it lacks of the last decision."""
        logger.info(f"nothing new since decision {self.state.number} (files: {change}); the champion stays")
        update_tracker(self.config, self.store, self.state)
        return 0

    def _held_out(self, dataset: Dataset) -> HeldOut:
        """The held-out split, which the first retraining chooses. UserError if fewer than two of its images exist."""
        fixed = self.state.held_out
        held = find_held_out(self.store.read_file(fixed) if fixed else None, dataset, self.config)
        if len(held.part) < 2:
            raise UserError(
                f"{held.missing} of the {held.missing + len(held.part)} images of the fixed held-out split are gone "
                f"from the data; restore them, or start over without {self.store.folder}"
            )
        if held.missing:
            logger.warning(f"{held.missing} images of the fixed held-out split are gone and are not compared")
        return held

    def _train(self, work: Work, data: FoundData) -> Trained:
        """Trains from the champion's weights, or from scratch without a champion."""
        config, champion = self.config, self.state.champion
        if champion is None:
            logger.info("step 3/5  training: there is no champion yet, the first model becomes it")
            return work.train(config, data)
        self.store.require_intact(champion)
        bundle = config.storage_place / champion.bundle
        logger.info(f"step 3/5  training from the champion's weights, {bundle}")
        return work.train(config.model_copy(update={"init_from": bundle.uri}), data)

    def _decide(
        self, data: _NewData, held: HeldOut, bundle: Path, challenger: BundleRecord, scores: HeldOutScores
    ) -> int:
        """Writes all files that the decision references, then champion.json, which makes it effective."""
        state, store, token = self.state, self.store, f"t{self.lease.token:06d}"
        verdict, reason = self._verdict(scores)
        is_better = verdict != "kept"
        champion = store.copy_bundle(bundle, challenger, self.lease) if is_better else state.champion
        snapshot = store.write_file(f"snapshots/{token}.parquet", to_bytes(data.snapshot), self.lease)
        split = state.held_out or store.write_file(f"held-out/{token}.parquet", held.file, self.lease)
        decision = {
            "decision": verdict,
            "reason": reason,
            "run": challenger.run_id,
            "challenger": challenger,
            "data": data.record,
            "held_out": split.model_dump() | {"images": len(held.part), "missing": held.missing},
            "scores": {
                "champion": None if scores.champion is None else _cider(scores.champion),
                "challenger": _cider(scores.challenger),
            },
            "difference": scores.difference,
            "asked": self.config.retrain.model_dump() | {"resamples": RESAMPLES},
        }
        after = {
            "champion": champion,
            "before": state.bundles if is_better else state.before,
            "challenger": None if is_better else challenger.run_id,
            "snapshot": snapshot,
            "fingerprint": data.record.fingerprint,
            "held_out": split,
        }
        return self._commit(decision, after, held.part, scores.challenger, scores.champion)

    def _verdict(self, scores: HeldOutScores) -> tuple[Verdict, str]:
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

    def _commit(self, fields: Values, after: Values, *shown: Any) -> int:
        """Writes a decision's files, then champion.json; returns the exit code.

        fields: the fields of the decision that are not set here. after: the fields of champion.json that change. shown:
        the last arguments of `decision_page`.
        """
        config, state, token = self.config, self.state, self.lease.token
        changes: Values = {"snapshot": state.snapshot} | after
        common = {
            "format": 1,
            "name": config.name,
            "number": state.number + 1,
            "token": token,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "champion": changes["champion"],
            "champion_before": state.champion,
            "snapshot": changes["snapshot"],
            "previous": state.decision,
        }
        decision = Decision.model_validate(common | fields)
        name = f"decisions/{decision.number:06d}-t{token:06d}"
        content = decision.model_dump_json(exclude_unset=True, indent=1).encode()
        record = self.store.write_file(f"{name}.json", content, self.lease)
        decorations = Decorations()
        with decorations.making("the decision's page"):
            self.store.write_file(f"{name}.html", decision_page(config, decision, *shown).encode(), self.lease)
        changes |= {"number": decision.number, "decision": record, "decided": (*state.decided, token)}
        self.store.commit(state.model_copy(update=changes), self.lease)
        logger.info(f"decision  {decision.decision}: {decision.reason}")
        update_tracker(config, self.store, self.store.read())
        logger.info(f"champion  {config.storage_place / decision.champion.bundle}")
        logger.info(f"record    {self.store.folder / name}.json{'' if decorations.failed else ', .html'}")
        decorations.log_failed("the decision is complete without it")
        return 0

    def roll_back(self) -> int:
        """Makes the former champion the champion again; returns the exit code."""
        state = self.state
        if not state.before or state.champion is None:
            raise UserError(f"--rollback: {self.config.name} has no earlier champion; nothing changed")
        former, run_id = state.before[-1], state.champion.run_id
        self.store.require_intact(former)
        reason = f"requested; the champion of run {run_id} is replaced by that of {former.run_id}"
        decision = {"decision": "rolled back", "reason": reason, "run": run_id}
        return self._commit(decision, {"champion": former, "before": state.before[:-1], "challenger": run_id})


def compare_scores(config: RunConfig, challenger: SplitScores, champion: SplitScores | None) -> HeldOutScores:
    """The paired difference in CIDEr-D of both models. Raises OSError when the models captioned different images."""
    ours, theirs = (each.cider_by_image if each is not None else {} for each in (challenger, champion))
    if not ours or (champion is not None and ours.keys() != theirs.keys()):
        raise OSError("some held-out images could be read for one model and not for the other; call again")
    difference = None
    if champion is not None:
        required = config.retrain.confidence
        difference = paired_difference([*ours.values()], [*theirs.values()], confidence=required, seed=config.seed)
    return HeldOutScores(challenger, champion, difference)


def _cider(scores: SplitScores) -> float:
    return float(scores.values["CIDEr-D"] or 0)
