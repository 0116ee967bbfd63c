"""Retraining in five steps: lease, what is new, training, comparison, decision. Safe to call at any time and twice.

Until the last write of the fifth step (`Ledger.commit`) nothing counts: whoever is killed before leaves files that
nobody names, and the next call goes on with the run that it finds, or does the step again. Every write is made under
the lease's token, so that an attempt that slept while the lease moved on changes nothing when it wakes up.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from pipeline.config.run import RunConfig
from pipeline.data.dataset import Dataset
from pipeline.data.loading import data_root, find_data
from pipeline.errors import UserError
from pipeline.retrain import held_out
from pipeline.retrain.champion import LEASE, BundleRecord, FileRecord, Ledger, State, bundle_record
from pipeline.retrain.data_listing import LISTING, Change, compare, list_data, new_keys, with_keys
from pipeline.retrain.decision_page import decision_page
from pipeline.runs.check import check_data
from pipeline.scoring.bootstrap import RESAMPLES, Difference, paired_difference
from pipeline.scoring.metrics import score_captions
from pipeline.storage.lease import Lease, LeaseRecord, LostLeaseError, take_lease
from pipeline.storage.path import StoragePath
from pipeline.storage.tables import from_bytes, to_bytes

logger = logging.getLogger(__name__)


SHOWN = 5  # findings of a check that are printed


class Trained(NamedTuple):
    """A finished run, its bundle (a local folder) and the fingerprint of the data that it was trained on."""

    run_id: str
    bundle: Path
    fingerprint: str


class Work(Protocol):
    """What needs a cluster."""

    def train(self, config: RunConfig) -> Trained:
        """Trains, or goes on with, the run that a configuration and its data are."""
        ...

    def caption(
        self, bundle: StoragePath, files: Mapping[str, str], part: Dataset, config: RunConfig
    ) -> dict[int, str]:
        """Captions by image id with a bundle whose files have these digests."""
        ...


class Comparison(NamedTuple):
    """CIDEr-D of two models on the same images; without a champion there is no score of it and no difference."""

    champion: float | None
    challenger: float
    difference: Difference | None
    per_image: dict[int, float]  # the challenger's


def retrain(config: RunConfig, work: Work) -> int:
    """New data in, a better model out, or nothing changed. Returns the exit code: 1 for bad data or a lost lease.

    Raises UserError for what the user can mend in the configuration.
    """
    held_out.held_out_split(config)  # refuse before anything is written
    ledger, lease = _begin(config)
    if isinstance(lease, LeaseRecord):
        logger.info(f"lease     held by {lease}; nothing to do here")
        return 0
    return _while_held(lease, lambda: _Retraining(config, work, ledger, lease).execute(), "promoted")


def rollback(config: RunConfig) -> int:
    """Gives the champion's place back to the one before. A retraining under way is fenced out: people go first."""
    ledger = Ledger(config.storage_place, config.name)
    if not ledger.read().before:
        raise UserError(
            f"--rollback: {config.name} has no champion before the present one in {config.storage.uri}; nothing changed"
        )
    ledger, lease = _begin(config, by_force=True)
    assert isinstance(lease, Lease)
    return _while_held(lease, lambda: _Retraining(config, None, ledger, lease).roll_back(), "rolled back")


def _begin(config: RunConfig, by_force: bool = False) -> tuple[Ledger, Lease | LeaseRecord]:
    ledger = Ledger(config.storage_place, config.name)
    above = ledger.read().token
    where, seconds = ledger.folder / LEASE, config.retrain.lease_seconds
    lease = take_lease(where, seconds, above=above, by_force=by_force)
    if isinstance(lease, Lease):
        logger.info(f"{'lease:   ' if by_force else 'step 1/5  lease:'} {where}, token {lease.token}")
    return ledger, lease


def _while_held(lease: Lease, act: Callable[[], int], undone: str) -> int:
    """The exit code of what is done under the lease; 1, said, when it moves on meanwhile."""
    try:
        with lease:
            return act()
    except LostLeaseError as error:
        logger.info(f"stopped   {error}; nothing was {undone}")
        return 1


@dataclass(frozen=True)
class _News:
    """What the second step found."""

    dataset: Dataset
    listing: pa.Table
    change: Change
    images: int  # whose content is new
    fingerprint: str | None
    root: str


@dataclass(frozen=True)
class _Match:
    """What a decision is made from."""

    news: _News
    fixed: bytes  # the fixed split's file
    held: held_out.HeldOut
    folder: Path  # of the challenger's bundle
    challenger: BundleRecord
    captions: dict[str, dict[int, str]]
    comparison: Comparison


class _Retraining:
    """One attempt under one lease."""

    def __init__(self, config: RunConfig, work: Work | None, ledger: Ledger, lease: Lease) -> None:
        self.config, self.work, self.ledger, self.lease = config, work, ledger, lease
        self.state = ledger.fence(lease)
        ledger.clean(lease)

    def execute(self) -> int:
        try:
            news = self._news()
        except UserError as error:
            if self.state.snapshot is None:
                raise
            logger.info(f"bad data  {error}")  # the configuration has worked before
            return 1
        if news is None:
            return 1
        if not news.images and news.fingerprint == self.state.fingerprint:
            logger.info(f"nothing new since decision {self.state.number} (files: {news.change}); the champion stays")
            self._follow()
            return 0
        fixed, held = self._held_out(news)
        if held.leaked:
            logger.info(
                f"bad data  {held.leaked} images of the fixed held-out split are now in training or validation; take "
                f"them out, or begin anew without {self.ledger.folder}"
            )
            return 1
        trained = self._train()
        if trained.fingerprint != news.fingerprint:
            logger.info("stopped   the data has changed during the retraining; the next call takes all of it")
            return 1
        self.lease.check()
        logger.info(f"step 4/5  comparison on {len(held.part)} held-out images")
        name = trained.bundle.relative_to(self.config.working_path).as_posix()
        challenger = bundle_record(trained.bundle, trained.run_id, name)
        captions = self._captions(challenger, held.part)
        comparison = compare_captions(self.config, held.part, captions)
        self.lease.check()
        logger.info("step 5/5  decision")
        return self._decide(_Match(news, fixed, held, trained.bundle, challenger, captions, comparison))

    def _captions(self, challenger: BundleRecord, part: Dataset) -> dict[str, dict[int, str]]:
        assert self.work is not None
        models = {"challenger": challenger} | ({"champion": self.state.champion} if self.state.champion else {})
        where, work, config = self.config.storage_place, self.work, self.config
        return {name: work.caption(where / each.bundle, each.files, part, config) for name, each in models.items()}

    def _news(self) -> _News | None:
        """What is new, and fit to train on; None (said) when it is not. No images when nothing is."""
        config = self.config
        root = data_root(config)
        listing = list_data(config, root)
        before = from_bytes(self.ledger.get(self.state.snapshot), LISTING) if self.state.snapshot else None
        change = compare(listing, before)
        logger.info(f"step 2/5  data: {listing.num_rows} files in {root}: {change}")
        if before is not None and not change.added and not change.changed:
            return _News(Dataset(pa.table({})), listing, change, 0, self.state.fingerprint, root)
        looked_at = None if before is None else before["key"].drop_null()
        findings = check_data(config, looked_at)
        for finding in [each for each in findings.findings if each["kind"] == "error"][:SHOWN]:
            logger.info(f"bad data  {finding['text']}")
        if not findings.ok:
            logger.info("the new data is not fit to train on (`raycap check` says more); nothing was changed")
            return None
        dataset = find_data(config)[0].known()
        images = new_keys(dataset, before)
        logger.info(f"          {images} images are new; they and their captions are fit to train on")
        return _News(dataset, listing, change, images, dataset.fingerprint(), root)

    def _held_out(self, news: _News) -> tuple[bytes, held_out.HeldOut]:
        fixed = self.ledger.get(self.state.held_out) if self.state.held_out else None
        body = fixed or held_out.encode(held_out.choose(news.dataset, self.config))
        held = held_out.locate(held_out.decode(body), news.dataset, self.config)
        if len(held.part) < 2:
            raise UserError(
                f"{held.missing} of the {held.missing + len(held.part)} images of the fixed held-out split are gone "
                f"from the data; bring them back, or begin anew without {self.ledger.folder}"
            )
        if held.missing:
            logger.warning(f"{held.missing} images of the fixed held-out split are gone and compare nothing")
        return body, held

    def _train(self) -> Trained:
        """The run from the champion's weights, extraction of what is new with it."""
        assert self.work is not None
        config, champion = self.config, self.state.champion
        if champion is None:
            logger.info("step 3/5  training: there is no champion yet, the first model becomes it")
        else:
            self._require_whole(champion)
            where = config.storage_place / champion.bundle
            logger.info(f"step 3/5  training from the champion's weights, {where}")
            config = config.model_copy(update={"init_from": where.uri})
        return self.work.train(config)

    def _require_whole(self, bundle: BundleRecord) -> None:
        wrong = next(self.ledger.damage(bundle), None)
        if wrong:
            raise OSError(f"a champion's bundle is damaged: {wrong}; restore it from a copy, nothing was changed")

    def _decide(self, match: _Match) -> int:
        """Writes all that the decision names, and then the one file that makes it count."""
        state, ledger, token, news = self.state, self.ledger, f"t{self.lease.token:06d}", match.news
        challenger, comparison = match.challenger, match.comparison
        decision, reason = self._verdict(comparison)
        won = decision != "kept"
        champion = ledger.put_bundle(match.folder, challenger, self.lease) if won else state.champion
        rows = to_bytes(with_keys(news.listing, news.dataset, news.root))
        snapshot = ledger.put(f"snapshots/{token}.parquet", rows, self.lease)
        split = state.held_out or ledger.put(f"held-out/{token}.parquet", match.fixed, self.lease)
        body = self._record(decision, reason, champion, snapshot) | {
            "run": challenger.run_id,
            "challenger": challenger.model_dump(),
            "data": {
                "root": news.root,
                "files": news.change._asdict(),
                "new_images": news.images,
                "images": len(news.dataset),
                "fingerprint": news.fingerprint,
            },
            "held_out": {**split.model_dump(), "images": len(match.held.part), "missing": match.held.missing},
            "scores": {"champion": comparison.champion, "challenger": comparison.challenger},
            "difference": comparison.difference and comparison.difference._asdict(),
            "asked": self.config.retrain.model_dump() | {"resamples": RESAMPLES},
        }
        after = state.model_copy(
            update={
                "champion": champion,
                "before": state.bundles if won else state.before,
                "challenger": None if won else challenger.run_id,
                "snapshot": snapshot,
                "fingerprint": news.fingerprint,
                "held_out": split,
            }
        )
        page = decision_page(self.config, body, match.held.part, match.captions, comparison.per_image)
        return self._commit(body, after, page)

    def _verdict(self, comparison: Comparison) -> tuple[str, str]:
        """first, promoted or kept; and why, in a sentence."""
        asked, difference = self.config.retrain, comparison.difference
        if difference is None:
            return "first", f"there was no champion; the first model, CIDEr-D {comparison.challenger:.4f}, becomes it"
        share = f"{100 * asked.confidence:g} % interval [{difference.low:+.4f}, {difference.high:+.4f}]"
        numbers = (
            f"CIDEr-D {comparison.challenger:.4f} against the champion's {comparison.champion or 0:.4f}: "
            f"{difference.mean:+.4f}, {share}"
        )
        if difference.low > asked.margin:
            return "promoted", f"{numbers} lies above the margin {asked.margin:g}"
        return "kept", f"{numbers} does not lie above the margin {asked.margin:g}; the champion stays"

    def _record(
        self, decision: str, reason: str, champion: BundleRecord | None, snapshot: FileRecord
    ) -> dict[str, Any]:
        state = self.state
        return {
            "format": 1,
            "name": self.config.name,
            "number": state.number + 1,
            "token": self.lease.token,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "decision": decision,
            "reason": reason,
            "champion": champion.model_dump() if champion else None,
            "champion_before": state.champion.model_dump() if state.champion else None,
            "snapshot": snapshot.model_dump(),
            "previous": state.decision.model_dump() if state.decision else None,
        }

    def _commit(self, body: dict[str, Any], after: State, page: str) -> int:
        name = f"decisions/{body['number']:06d}-t{self.lease.token:06d}"
        text = json.dumps(body, indent=1, ensure_ascii=False).encode()
        record = self.ledger.put(f"{name}.json", text, self.lease)
        self.ledger.put(f"{name}.html", page.encode(), self.lease)
        made = {"number": body["number"], "decision": record, "decided": (*self.state.decided, self.lease.token)}
        self.ledger.commit(after.model_copy(update=made), self.lease)
        self.state = self.ledger.read()
        logger.info(f"decision  {body['decision']}: {body['reason']}")
        self._follow()
        logger.info(f"champion  {self.config.storage_place / body['champion']['bundle']}")
        logger.info(f"record    {self.ledger.folder / name}.json, .html")
        return 0

    def roll_back(self) -> int:
        state = self.state
        if not state.before or state.champion is None or state.snapshot is None:
            raise UserError(f"--rollback: {self.config.name} has no champion before the present one; nothing changed")
        self._require_whole(state.before[-1])
        reason = (
            f"asked for; the champion of run {state.champion.run_id} gives way to that of {state.before[-1].run_id}"
        )
        body = self._record("rolled back", reason, state.before[-1], state.snapshot) | {"run": state.champion.run_id}
        after = state.model_copy(
            update={
                "champion": state.before[-1],
                "before": state.before[:-1],
                "challenger": state.champion.run_id,
            }
        )
        return self._commit(body, after, decision_page(self.config, body))

    def _follow(self) -> None:
        """Tells the tracker, which may be down: every later call tells it again."""
        if self.config.tracking.enabled and self.state.champion is not None:
            from pipeline.retrain.tracking import follow  # torch and MLflow: seconds that a quiet call can do without

            follow(self.config, self.ledger, self.state)


def compare_captions(config: RunConfig, part: Dataset, captions: Mapping[str, dict[int, str]]) -> Comparison:
    """CIDEr-D of both models, and its paired difference. OSError when they did not caption the same images."""
    ours, theirs = captions["challenger"], captions.get("champion")
    if not ours or (theirs is not None and theirs.keys() != ours.keys()):
        raise OSError("some held-out images could be read for one model and not for the other; call again")
    references = {image: found for image, found in part.references().items() if image in ours}

    def score(found: dict[int, str]) -> tuple[float, list[float]]:
        result = score_captions(references, found, metrics=("CIDEr-D",)).by_name["CIDEr-D"]
        return float(result.value or 0), list(result.per_image or [])

    challenger, per_image = score(ours)
    champion, difference = None, None
    if theirs is not None:
        champion, others = score(theirs)
        difference = paired_difference(per_image, others, confidence=config.retrain.confidence, seed=config.seed)
    return Comparison(champion, challenger, difference, dict(zip(references, per_image, strict=True)))
