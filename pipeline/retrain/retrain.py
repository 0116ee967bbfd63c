"""Retraining in five steps: lease, new data, training, comparison, decision. Calls may overlap.

Nothing changes before the last write of the fifth step (`ChampionStore.commit`). If a process is killed earlier, the
next call deletes its files, resumes its training run and repeats the other steps. Every write needs the lease's token,
so a process that was suspended until another one took the lease cannot write after it continues.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import pyarrow as pa

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.data.loading import data_root, find_data
from pipeline.errors import UserError
from pipeline.retrain import held_out
from pipeline.retrain.champion import (
    LEASE,
    BundleRecord,
    ChampionState,
    ChampionStore,
    DataRecord,
    Decision,
    DifferenceRecord,
    FileRecord,
    HeldOutRecord,
    ScoreRecord,
    bundle_record,
)
from pipeline.retrain.data_listing import LISTING, Change, compare, list_data, new_keys, with_keys
from pipeline.retrain.decision_page import decision_page
from pipeline.retrain.tracking import follow
from pipeline.runs.check import check_data
from pipeline.scoring.bootstrap import RESAMPLES, Difference, paired_difference
from pipeline.scoring.metrics import score_captions
from pipeline.storage.lease import Lease, LeaseRecord, LostLeaseError, take_lease
from pipeline.storage.path import StoragePath
from pipeline.storage.tables import from_bytes, to_bytes

logger = logging.getLogger(__name__)

MAX_FINDINGS_SHOWN = 5
Verdict = Literal["first", "promoted", "kept", "rolled back"]


class Trained(NamedTuple):
    """A finished run, its bundle (a local folder) and the fingerprint of its training data."""

    run_id: str
    bundle: Path
    fingerprint: str


class Work(Protocol):
    """The steps of a retraining that run on a cluster."""

    def train(self, config: RunConfig) -> Trained:
        """Trains a configuration on its data, or resumes the run when it exists."""
        ...

    def caption(
        self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig
    ) -> dict[int, str]:
        """Captions by image id, from a bundle; `files` gives the digests that its files must have."""
        ...


class Comparison(NamedTuple):
    """CIDEr-D of two models on the same images; `champion` and `difference` are None without a champion."""

    champion: float | None
    challenger: float
    difference: Difference | None
    per_image: dict[int, float]  # the challenger's score of each image


def retrain(config: RunConfig, work: Work) -> int:
    """Promotes a model trained on new data if it beats the champion. Returns 0, or 1 for bad data or a lost lease.

    Raises UserError for errors in the configuration.
    """
    held_out.held_out_split(config)  # raises before anything is written
    store, lease = _acquire_lease(config)
    if isinstance(lease, LeaseRecord):
        logger.info(f"lease     held by {lease}; nothing to do here")
        return 0
    return _run_under_lease(lease, lambda: _Retraining(config, work, store, lease).execute(), "promoted")


def rollback(config: RunConfig) -> int:
    """Restores the previous champion. Takes the lease by force, which fences out a running retraining."""
    store = ChampionStore(config.storage_place, config.name)
    if not store.read().before:
        raise UserError(
            f"--rollback: {config.name} has no champion before the present one in {config.storage.uri}; nothing changed"
        )
    store, lease = _acquire_lease(config, by_force=True)
    assert isinstance(lease, Lease)
    return _run_under_lease(lease, lambda: _Retraining(config, None, store, lease).roll_back(), "rolled back")


def _acquire_lease(config: RunConfig, by_force: bool = False) -> tuple[ChampionStore, Lease | LeaseRecord]:
    """The store with its lease, or with the record of the process that has the lease."""
    store = ChampionStore(config.storage_place, config.name)
    path, seconds = store.folder / LEASE, config.retrain.lease_seconds
    # a new token must be larger than champion.json's, even after the lease's file was deleted
    lease = take_lease(path, seconds, above=store.read().token, by_force=by_force)
    if isinstance(lease, Lease):
        logger.info(f"{'lease:   ' if by_force else 'step 1/5  lease:'} {path}, token {lease.token}")
    return store, lease


def _run_under_lease(lease: Lease, act: Callable[[], int], undone: str) -> int:
    """Runs `act` under the lease and returns its exit code; 1 when the lease is lost meanwhile."""
    try:
        with lease:
            return act()
    except LostLeaseError as error:
        logger.info(f"stopped   {error}; nothing was {undone}")
        return 1


@dataclass(frozen=True)
class _NewData:
    """The result of the second step. Without changed files `dataset` is empty."""

    dataset: Dataset
    listing: pa.Table
    change: Change
    num_images: int  # the number of images with new content
    fingerprint: str | None
    root: str


@dataclass(frozen=True)
class _Evidence:
    """The input of a decision."""

    data: _NewData
    fixed_split: bytes  # the held-out split as a file
    held_out: held_out.HeldOut
    folder: Path  # the challenger's bundle
    challenger: BundleRecord
    captions: dict[str, dict[int, str]]  # by model (champion, challenger) and image id
    comparison: Comparison


class _Retraining:
    """One retraining or rollback under one lease."""

    def __init__(self, config: RunConfig, work: Work | None, store: ChampionStore, lease: Lease) -> None:
        self.config, self.work, self.store, self.lease = config, work, store, lease
        self.state = store.fence(lease)
        store.remove_orphans(lease)

    def execute(self) -> int:
        """Steps 2 to 5 of a retraining; returns the exit code."""
        try:
            data = self._new_data()
        except UserError as error:
            if self.state.snapshot is None:
                raise
            logger.info(f"bad data  {error}")  # the same configuration worked before, so the data is at fault
            return 1
        if data is None:
            return 1
        if not data.num_images and data.fingerprint == self.state.fingerprint:
            logger.info(f"nothing new since decision {self.state.number} (files: {data.change}); the champion stays")
            self._track()
            return 0
        fixed_split, held = self._held_out(data)
        if held.leaked:
            logger.info(
                f"bad data  {held.leaked} images of the fixed held-out split are now in training or validation; take "
                f"them out, or start over without {self.store.folder}"
            )
            return 1
        trained = self._train()
        if trained.fingerprint != data.fingerprint:
            logger.info("stopped   the data has changed during the retraining; the next call uses all of it")
            return 1
        self.lease.check()
        logger.info(f"step 4/5  comparison on {len(held.part)} held-out images")
        name = trained.bundle.relative_to(self.config.working_path).as_posix()
        challenger = bundle_record(trained.bundle, trained.run_id, name)
        captions = self._captions(challenger, held.part)
        comparison = compare_captions(self.config, held.part, captions)
        self.lease.check()
        logger.info("step 5/5  decision")
        return self._decide(_Evidence(data, fixed_split, held, trained.bundle, challenger, captions, comparison))

    def _captions(self, challenger: BundleRecord, part: Dataset) -> dict[str, dict[int, str]]:
        """The captions of the challenger and, if it exists, the champion, by model and image id."""
        assert self.work is not None
        models = {"challenger": challenger} | ({"champion": self.state.champion} if self.state.champion else {})
        storage, work, config = self.config.storage_place, self.work, self.config
        return {name: work.caption(storage / model.bundle, model.files, part, config) for name, model in models.items()}

    def _new_data(self) -> _NewData | None:
        """The data that changed since the last decision; None, after logging the errors, when it is invalid."""
        config = self.config
        root = data_root(config)
        listing = list_data(config, root)
        before = from_bytes(self.store.read_file(self.state.snapshot), LISTING) if self.state.snapshot else None
        change = compare(listing, before)
        logger.info(f"step 2/5  data: {listing.num_rows} files in {root}: {change}")
        if before is not None and not change.added and not change.changed:
            return _NewData(Dataset(pa.table({})), listing, change, 0, self.state.fingerprint, root)
        # images of the previous listing were checked then
        checked_before = None if before is None else before["key"].drop_null()
        findings = check_data(config, checked_before)
        for finding in [finding for finding in findings.findings if finding.kind == "error"][:MAX_FINDINGS_SHOWN]:
            logger.info(f"bad data  {finding.text}")
        if not findings.ok:
            logger.info("the new data cannot be trained on (`raycap check` lists all errors); nothing was changed")
            return None
        dataset = find_data(config)[0].readable()
        num_images = new_keys(dataset, before)
        logger.info(f"          {num_images} images are new; they and their captions passed the check")
        return _NewData(dataset, listing, change, num_images, dataset.fingerprint(), root)

    def _held_out(self, data: _NewData) -> tuple[bytes, held_out.HeldOut]:
        """The held-out split as a file, fixed now if it is the first, and its images that still exist."""
        encoded = self.store.read_file(self.state.held_out) if self.state.held_out else None
        encoded = encoded or held_out.encode(held_out.choose(data.dataset, self.config))
        held = held_out.locate(held_out.decode(encoded), data.dataset, self.config)
        if len(held.part) < 2:
            raise UserError(
                f"{held.missing} of the {held.missing + len(held.part)} images of the fixed held-out split are gone "
                f"from the data; restore them, or start over without {self.store.folder}"
            )
        if held.missing:
            logger.warning(f"{held.missing} images of the fixed held-out split are gone and are not compared")
        return encoded, held

    def _train(self) -> Trained:
        """Trains from the champion's weights, or from scratch without a champion."""
        assert self.work is not None
        config, champion = self.config, self.state.champion
        if champion is None:
            logger.info("step 3/5  training: there is no champion yet, the first model becomes it")
        else:
            self._require_intact(champion)
            bundle = config.storage_place / champion.bundle
            logger.info(f"step 3/5  training from the champion's weights, {bundle}")
            config = config.model_copy(update={"init_from": bundle.uri})
        return self.work.train(config)

    def _require_intact(self, bundle: BundleRecord) -> None:
        """OSError for a bundle with a missing or changed file."""
        damage = next(self.store.damage(bundle), None)
        if damage:
            raise OSError(f"a champion's bundle is damaged: {damage}; restore it from a copy, nothing was changed")

    def _decide(self, evidence: _Evidence) -> int:
        """Writes all files that the decision references, then champion.json, which makes it effective."""
        state, store, token, data = self.state, self.store, f"t{self.lease.token:06d}", evidence.data
        challenger, comparison = evidence.challenger, evidence.comparison
        verdict, reason = self._verdict(comparison)
        won = verdict != "kept"
        champion = store.copy_bundle(evidence.folder, challenger, self.lease) if won else state.champion
        assert champion is not None
        rows = to_bytes(with_keys(data.listing, data.dataset, data.root))
        snapshot = store.write_file(f"snapshots/{token}.parquet", rows, self.lease)
        split = state.held_out or store.write_file(f"held-out/{token}.parquet", evidence.fixed_split, self.lease)
        difference = comparison.difference
        decision = self._decision(verdict, reason, champion, snapshot, challenger.run_id).model_copy(
            update={
                "challenger": challenger,
                "data": DataRecord(
                    root=data.root,
                    files=data.change,
                    new_images=data.num_images,
                    images=len(data.dataset),
                    fingerprint=data.fingerprint,
                ),
                "held_out": HeldOutRecord(
                    **split.model_dump(), images=len(evidence.held_out.part), missing=evidence.held_out.missing
                ),
                "scores": ScoreRecord(champion=comparison.champion, challenger=comparison.challenger),
                "difference": None if difference is None else DifferenceRecord(**difference._asdict()),
                "asked": self.config.retrain.model_dump() | {"resamples": RESAMPLES},
            }
        )
        after = state.model_copy(
            update={
                "champion": champion,
                "before": state.bundles if won else state.before,
                "challenger": None if won else challenger.run_id,
                "snapshot": snapshot,
                "fingerprint": data.fingerprint,
                "held_out": split,
            }
        )
        page = decision_page(self.config, decision, evidence.held_out.part, evidence.captions, comparison.per_image)
        return self._commit(decision, after, page)

    def _verdict(self, comparison: Comparison) -> tuple[Verdict, str]:
        """The verdict and its reason in one sentence."""
        required, difference = self.config.retrain, comparison.difference
        if difference is None:
            return "first", f"there was no champion; the first model, CIDEr-D {comparison.challenger:.4f}, becomes it"
        interval = f"{100 * required.confidence:g} % interval [{difference.low:+.4f}, {difference.high:+.4f}]"
        numbers = (
            f"CIDEr-D {comparison.challenger:.4f} against the champion's {comparison.champion or 0:.4f}: "
            f"{difference.mean:+.4f}, {interval}"
        )
        if difference.low > required.margin:
            return "promoted", f"{numbers} is above the margin {required.margin:g}"
        return "kept", f"{numbers} is not above the margin {required.margin:g}; the champion stays"

    def _decision(
        self, verdict: Verdict, reason: str, champion: BundleRecord, snapshot: FileRecord, run_id: str
    ) -> Decision:
        """The fields that decisions and rollbacks share."""
        return Decision(
            format=1,
            name=self.config.name,
            number=self.state.number + 1,
            token=self.lease.token,
            time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            decision=verdict,
            reason=reason,
            champion=champion,
            champion_before=self.state.champion,
            snapshot=snapshot,
            previous=self.state.decision,
            run=run_id,
        )

    def _commit(self, decision: Decision, after: ChampionState, page: str) -> int:
        """Writes the decision's files and then `after` as the state; returns the exit code."""
        name = f"decisions/{decision.number:06d}-t{self.lease.token:06d}"
        record = self.store.write_file(f"{name}.json", decision.to_json(), self.lease)
        self.store.write_file(f"{name}.html", page.encode(), self.lease)
        decided = (*self.state.decided, self.lease.token)
        update = {"number": decision.number, "decision": record, "decided": decided}
        self.store.commit(after.model_copy(update=update), self.lease)
        self.state = self.store.read()
        logger.info(f"decision  {decision.decision}: {decision.reason}")
        self._track()
        logger.info(f"champion  {self.config.storage_place / decision.champion.bundle}")
        logger.info(f"record    {self.store.folder / name}.json, .html")
        return 0

    def roll_back(self) -> int:
        """Makes the former champion the champion again; returns the exit code."""
        state = self.state
        if not state.before or state.champion is None or state.snapshot is None:
            raise UserError(f"--rollback: {self.config.name} has no champion before the present one; nothing changed")
        former = state.before[-1]
        self._require_intact(former)
        reason = f"requested; the champion of run {state.champion.run_id} is replaced by that of {former.run_id}"
        decision = self._decision("rolled back", reason, former, state.snapshot, state.champion.run_id)
        after = state.model_copy(
            update={"champion": former, "before": state.before[:-1], "challenger": state.champion.run_id}
        )
        return self._commit(decision, after, decision_page(self.config, decision))

    def _track(self) -> None:
        """Updates the tracker. If it is down, a later call updates it."""
        if self.config.tracking.enabled and self.state.champion is not None:
            follow(self.config, self.store, self.state)


def compare_captions(config: RunConfig, part: Dataset, captions: Mapping[str, dict[int, str]]) -> Comparison:
    """CIDEr-D of both models and its paired difference. OSError when they captioned different images."""
    challenger_captions, champion_captions = captions["challenger"], captions.get("champion")
    images_differ = champion_captions is not None and champion_captions.keys() != challenger_captions.keys()
    if not challenger_captions or images_differ:
        raise OSError("some held-out images could be read for one model and not for the other; call again")
    references = {image: texts for image, texts in part.references().items() if image in challenger_captions}

    def score(hypotheses: dict[int, str]) -> tuple[float, list[float]]:
        result = score_captions(references, hypotheses, metrics=("CIDEr-D",)).by_name["CIDEr-D"]
        return float(result.value or 0), list(result.per_image or [])

    challenger, per_image = score(challenger_captions)
    champion, difference = None, None
    if champion_captions is not None:
        champion, champion_per_image = score(champion_captions)
        difference = paired_difference(
            per_image, champion_per_image, confidence=config.retrain.confidence, seed=config.seed
        )
    return Comparison(champion, challenger, difference, dict(zip(references, per_image, strict=True)))
