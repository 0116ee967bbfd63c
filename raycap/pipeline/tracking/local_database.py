"""MLflow's SQLite file, which appears whole or not at all.

MLflow creates it by dozens of migrations, and a kill between two of them would leave a file that no later process can
use. Here one process at a time creates it under a temporary name.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
from contextlib import closing
from pathlib import Path

from raycap.pipeline.storage.atomic import atomic_path, file_lock

logger = logging.getLogger(__name__)

FIRST_TABLES = {"experiments", "runs", "metrics", "params", "tags"}  # the first step of the creation makes them


def ensure_database(path: Path) -> None:
    """Creates MLflow's database if it is missing. One whose creation was cut off is renamed, and a new one is created.

    Such a file has no experiment, so nothing is lost. Raises what MLflow raises.
    """
    if path.exists() and not _was_cut_off(path):
        return
    with file_lock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            if not _was_cut_off(path):
                return  # another process has created it meanwhile
            names = (f"{path.name}.incomplete{number or ''}" for number in itertools.count())
            aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
            path.replace(aside)
            logger.warning(f"tracker   the creation of {path} was cut off; it is now {aside.name}, and made anew")
        for left in path.parent.glob(f".{path.name}.*.tmp*"):  # of a process that was killed below
            left.unlink(missing_ok=True)
        with atomic_path(path) as temporary:
            _create(temporary)


def _create(path: Path) -> None:
    """Creates a database with MLflow's tables and its first experiment."""
    from mlflow import MlflowClient

    MlflowClient(f"sqlite:///{path}").search_experiments(max_results=1)


def _was_cut_off(path: Path) -> bool:
    """Whether a file has MLflow's first tables, or none, and lacks an experiment.

    MLflow adds an experiment as the last step of the creation and never removes it.
    """
    try:
        with closing(sqlite3.connect(path)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "experiments" in tables:
                return connection.execute("SELECT 1 FROM experiments LIMIT 1").fetchone() is None
            return not tables or bool(tables & FIRST_TABLES)
    except sqlite3.DatabaseError:  # not SQLite's, or it is locked or cannot be read, which MLflow reports
        return False
