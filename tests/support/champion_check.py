"""Checks champion.json, every file that it references, and all decisions."""

from __future__ import annotations

from raycap.pipeline.errors import UserError
from raycap.pipeline.retrain.champion import BundleRecord, ChampionState, ChampionStore, Decision


def decisions(store: ChampionStore, state: ChampionState) -> list[Decision]:
    """The decisions, newest first. OSError for a file that is missing or changed."""
    found, record = list[Decision](), state.decision
    while record is not None:
        found.append(store.decision(record))
        record = found[-1].previous
    return found


def errors_of(store: ChampionStore) -> list[str]:
    """One sentence per error. Reads every champion's bundle and all records once.

    The champion and all bundles that rollbacks can restore must be intact. The decisions must form a complete chain
    which ends with this champion. Every referenced file must have its recorded digest.
    """
    try:
        state = store.read()
    except UserError as error:
        return [str(error)]
    errors = []
    for bundle in state.bundles:
        try:
            store.require_intact(bundle)
        except OSError as error:
            errors.append(str(error))
    try:
        chain = decisions(store, state)[::-1]
        for record in (state.snapshot, state.held_out, *(decision.snapshot for decision in chain)):
            if record:
                store.read_file(record)
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
    tokens = tuple(decision.token for decision in chain)
    if tokens != state.decided or list(tokens) != sorted({*tokens}) or max((0, *tokens)) > state.token:
        errors.append(f"the decisions' tokens {tokens} are not those of champion.json, or not increasing")
    return errors
