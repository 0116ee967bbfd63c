from tests.support.exports import exported  # noqa: F401
