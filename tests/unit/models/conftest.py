"""Every test of the models runs with one thread."""

from tests.support.models import one_thread

__all__ = ["one_thread"]
