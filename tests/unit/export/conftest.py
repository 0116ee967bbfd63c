from tests.support.exports import exported  # noqa: F401
from tests.support.models import one_thread  # noqa: F401
