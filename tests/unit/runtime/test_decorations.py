"""Decorations that fail are recorded; mistakes of the user and Ctrl-C end the command."""

from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError

from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.log import Decorations


def test_a_failure_is_recorded_with_its_reason_and_said_in_one_line(log_lines: list[str]) -> None:
    decorations = Decorations()
    with decorations.making("the plot"):
        raise ZeroDivisionError("no\nrange")
    with decorations.making("the page"):
        pass
    wrapped = RuntimeError("a long traceback")
    wrapped.cause = ValueError("no grid")  # type: ignore[attr-defined]  # as Ray's errors have it
    with decorations.making("the maps"):
        raise wrapped
    with decorations.making("the pictures"):
        raise RayTaskError("task", "Traceback ...", UserError("this node has no GPU")).as_instanceof_cause()
    assert decorations.failed == {
        "the plot": "ZeroDivisionError: no range",
        "the maps": "ValueError: no grid",
        "the pictures": "UserError: this node has no GPU",
    }
    decorations.log_failed()
    assert log_lines[0] == ("the plot could not be made (ZeroDivisionError: no range); the same command makes it again")
    assert len(log_lines) == 3


@pytest.mark.parametrize("error", [UserError("model.num_heads is 3; give 4"), KeyboardInterrupt()])
def test_mistakes_of_the_user_and_ctrl_c_pass_through(error: BaseException) -> None:
    decorations = Decorations()
    with pytest.raises(type(error)), decorations.making("the page"):
        raise error
    assert not decorations.failed
