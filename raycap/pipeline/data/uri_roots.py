"""Reads images at URIs that strangers send, below folders and prefixes that the operator has named."""

from __future__ import annotations

import logging
from typing import Any

from raycap.pipeline.data.images import BadImage, read_image_file
from raycap.pipeline.errors import UserError
from raycap.pipeline.runtime.names import printable, relative_name
from raycap.pipeline.runtime.secrets import without_secrets
from raycap.pipeline.storage.path import StorageOptions, StoragePath, join, storage_path

NOT_READABLE = "uri is not a readable image below uri_roots"  # one text for every reason, which may be a secret
logger = logging.getLogger(__name__)


class UriRoots:
    """The local folders and s3:// prefixes below which images may be read for strangers. Without any, none is read.

    Raises ValueError unless `roots` is a list of folders and prefixes.
    """

    def __init__(self, roots: Any = (), options: StorageOptions = StorageOptions()) -> None:
        if not isinstance(roots, (list, tuple)) or not all(isinstance(root, str) and root.strip() for root in roots):
            raise ValueError(f"uri_roots is {roots!r}; expected a list of folders and s3:// prefixes")
        self.roots = tuple(storage_path(root, options.hasty) for root in roots)

    def read(self, uri: str) -> bytes:
        """The content of the image file at a URI. Raises BadImage; only the log has the reason why it cannot be read.

        The text of the error is the same for a file that is missing, not allowed, or no file.
        """
        try:
            return read_image_file(self._place(uri))
        except Exception as error:
            logger.warning(f"{printable(uri[:1000])}: {printable(without_secrets(str(error))[:1000])}")
            raise BadImage(NOT_READABLE) from error

    def _place(self, uri: str) -> StoragePath:
        """The place of a URI below one of the roots. Raises UserError or OSError if it is elsewhere, also by a link.

        Nothing is opened for a URI that does not begin with a root.
        """
        place = uri.removeprefix("file://")
        for root in self.roots:
            prefix = join(root.uri, "")
            if place.startswith(prefix):
                path = root / relative_name(place.removeprefix(prefix), "uri")
                if path.is_remote:
                    return path
                resolved = path.path.resolve(strict=True)
                if resolved.is_relative_to(root.path.resolve()):
                    return StoragePath(str(resolved))
        raise UserError("it is not below uri_roots")
