"""Checks champion.json, every file that it references, and all decisions."""

from __future__ import annotations

import hashlib

from raycap.pipeline.errors import UserError
from raycap.pipeline.retrain.champion import BundleRecord, ChampionState, ChampionStore, Decision


def decisions(store: ChampionStore, state: ChampionState) -> list[Decision]:
    """The decisions, newest first. OSError for a file that is missing."""
    found, name = list[Decision](), state.decision
    while name is not None:
        found.append(Decision.model_validate_json((store.folder / name).read_bytes()))
        name = found[-1].previous
    return found


def errors_of(store: ChampionStore) -> list[str]:
    """One sentence per error. Reads every champion's bundle and all records once.

    The champion and all bundles that rollbacks can restore must be intact. The decisions must form a complete chain
    which ends with this champion. Every referenced file must exist.
    """
    try:
        state = store.read()
    except UserError as error:
        return [str(error)]
    errors = []
    try:
        for bundle in state.bundles:
            for name, digest in bundle.files.items():
                if hashlib.sha256((store.storage / bundle.bundle / name).read_bytes()).hexdigest() != digest:
                    errors.append(f"{bundle.bundle}/{name} has changed")
        chain = decisions(store, state)[::-1]
        for name in (state.snapshot, state.held_out, *(decision.snapshot for decision in chain)):
            if name:
                (store.folder / name).read_bytes()
    except (OSError, ValueError) as error:
        return [*errors, f"{type(error).__name__}: {error}"]
    return errors + _chain_errors(state, chain)


def _chain_errors(state: ChampionState, chain: list[Decision]) -> list[str]:
    """One sentence per contradiction between champion.json and the decisions; the oldest decision is first."""
    errors = []
    numbers = [decision.number for decision in chain]
    if numbers != list(range(1, state.number + 1)):
        errors.append(f"the decisions are {numbers}, the last is {state.number}")
    champions: list[BundleRecord] = []
    for decision in chain:
        if decision.decision in ("first", "promoted"):
            champions.append(decision.champion)
        elif decision.decision == "rolled back":
            champions.pop()
        if not champions or decision.champion != champions[-1]:
            errors.append(f"decision {decision.number} contradicts the decisions before it")
            break
    if tuple(champions) != state.bundles:
        errors.append("the champions of the decisions are not those of champion.json")
    tokens = [decision.token for decision in chain]
    if tokens[-1:] != [state.decided] * bool(tokens) or tokens != sorted({*tokens}) or state.decided > state.token:
        errors.append(f"the decisions' tokens {tokens} do not end with that of champion.json, or do not grow")
    return errors
