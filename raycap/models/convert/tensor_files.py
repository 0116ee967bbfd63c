"""Reads files of tensors that others wrote. What a file claims is compared with its size before memory is used."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import re
import resource
import stat
import zipfile
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

# Reading a file of a stranger may take this memory and 4 times its size, and this CPU time and 1 s per 64 MiB. A pickle
# of 1 kB can nest tuples, as keys of a dictionary, so that their hashes take years.
READING_BYTES, READING_S = 2**30, 5
Content = TypeVar("Content")
MAX_REASON = 300
MAX_HEADER_BYTES = 2**20  # of a safetensors file; the header of Swin-L with ExpansionNet v2 has 0.05 MB


class _Ignored:
    """Takes the place of NumPy objects in a training checkpoint (random states, scores), so that they are not read."""

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


# both names of a NumPy package, because NumPy has renamed `core` to `_core`, and checkpoints contain either
_NUMPY_NAMES = [f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")]
_NUMPY_NAMES += ["numpy.ndarray", "numpy.dtype"]


def check_file(path: Path, module: nn.Module) -> None:
    """Raises ValueError unless a safetensors file has the module's tensors (by its header) and fits into memory."""
    try:
        _require_memory(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes; the limit is {MAX_HEADER_BYTES}")
        # only the header is read; with "pt" instead of "numpy", the whole file would be mapped as private memory
        with safe_open(path, "numpy") as content:
            parts = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118 - it is no dictionary
        state = {}
        for name, part in parts.items():
            dtype = torch.float32 if "F" in part.get_dtype() else torch.int64
            state[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    except Exception as error:  # a damaged file can raise almost any exception
        raise ValueError(f"{path} is no readable safetensors file ({reason_of(error)})") from error
    check_fits(module, state, str(path))


def bounded(without_pickle: str | None = None) -> Callable[[Callable[[Path], Content]], Callable[[Path], Content]]:
    """A decorator for a function that reads a pickle. A child process calls it first, with limits of time and memory.

    The function then also raises ValueError above a limit. without_pickle: the ending of files that the function reads
    without a pickle, and without the child process.
    """

    def decorate(read: Callable[[Path], Content]) -> Callable[[Path], Content]:
        @functools.wraps(read)
        def bounded_read(path: Path) -> Content:
            if path.suffix != without_pickle and path.is_file():
                _try(read, path)
            return read(path)

        return bounded_read

    return decorate


def _try(read: Callable[[Path], object], path: Path) -> None:
    """Calls `read` in a child process. Raises ValueError above a limit, and with the text of any error of `read`."""
    size = path.stat().st_size
    num_bytes, seconds = READING_BYTES + 4 * size, READING_S + size // 2**26
    problem = (
        f"{path} is refused: reading it takes more than {seconds} s of computing or {num_bytes >> 20} MiB, or crashes"
    )
    receiver, sender = multiprocessing.Pipe(duplex=False)
    arguments = (read, path, sender, num_bytes, seconds)
    limited = multiprocessing.get_context("fork").Process(target=_limited, args=arguments)
    limited.start()
    sender.close()
    try:
        with receiver, suppress(EOFError):
            if receiver.poll(10 * seconds):  # the machine may be busy
                problem = receiver.recv_bytes().decode()
    finally:
        limited.kill()
        limited.join()
    if problem:
        raise ValueError(problem)


def _limited(read: Callable[[Path], object], path: Path, sender: Connection, num_bytes: int, seconds: int) -> None:
    """Calls `read` with limits for this process. Sends the text of its error, or an empty one."""
    status = Path("/proc/self/statm")
    if status.exists():  # on Linux
        used = int(status.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _lower(resource.RLIMIT_AS, used + num_bytes)
    _lower(resource.RLIMIT_CPU, seconds)
    try:
        read(path)
        sender.send_bytes(b"")
    except Exception as error:  # the caller raises it again
        text = str(error) or f"{path} is refused: reading it ends with {type(error).__name__}"
        sender.send_bytes(text.encode(errors="replace"))
    os._exit(0)


def _lower(limit: int, value: int) -> None:
    """Sets a limit of this process, unless a lower one is set, which cannot be raised."""
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


@bounded(".safetensors")
def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, or of a PyTorch file, whose code is not run (`weights_only`).

    The tensors may be in dictionaries under `model`, `state_dict` or `model_state_dict`. The rest of a training
    checkpoint (optimizer, scheduler, random states) is left out, as are the parts of names that wrappers add. Raises
    ValueError for other content, for a file that this machine could not load or that claims to be larger than it is.
    """
    try:
        _require_memory(path)
        if path.suffix == ".safetensors":
            content: object = load_file(path)
        else:
            _require_plain_records(path)
            ignored = torch.serialization.safe_globals([(_Ignored, name) for name in _NUMPY_NAMES])
            with ignored:
                content = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError as error:
        raise ValueError(f"{path} is refused: it needs far more memory than its size; save the state dict") from error
    except (pickle.UnpicklingError, EOFError) as error:
        # torch's message is not shown, because it advises to turn `weights_only` off
        raise ValueError(
            f"{path} is refused: it is no PyTorch file, or holds more than tensors, plain values and random "
            f"states; save the model's state dict alone"
        ) from error
    except OSError as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error}") from error
    except Exception as error:  # a damaged file can raise almost any exception
        raise ValueError(f"{path} is no readable checkpoint ({reason_of(error)})") from error
    for key in 2 * ("model_state_dict", "state_dict", "model"):  # in any order
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(each, Tensor) for each in content.values()):
        found = ", ".join(map(repr, content)) if isinstance(content, dict) and content else type(content).__name__
        raise ValueError(
            f"{path} is not a model's checkpoint: it has {found[:MAX_REASON]}; expected a dictionary of tensors, also "
            "under 'model' or 'state_dict'"
        )
    for name, tensor in content.items():
        wrong = None
        if not isinstance(name, str):
            wrong = "its name is no string"
        elif tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            wrong = f"it is no plain tensor ({tensor.layout}, {tensor.device})"
        elif tensor.is_complex():
            wrong = "its numbers are complex"
        elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            wrong = f"its shape {tuple(tensor.shape)} claims more than the file holds"
        if wrong is not None:
            raise ValueError(f"{path}: the tensor {name!r} is refused: {wrong}")
    names = [re.sub(r"(?<![^.])_orig_mod\.", "", name) for name in content]  # without what torch.compile adds
    for wrapper in 3 * ("module.", "model."):  # DataParallel adds the first one
        if all(name.startswith(wrapper) for name in names):
            names = [name.removeprefix(wrapper) for name in names]
    return dict(zip(names, content.values(), strict=True))


def _require_memory(path: Path) -> None:
    """Raises ValueError for a file that does not fit into memory twice, as tensors and as the model's weights."""
    status, memory = path.stat(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not stat.S_ISREG(status.st_mode):  # refused, because opening a pipe would wait for its writer
        raise ValueError("it is not a regular file")
    if 2 * status.st_size > memory:
        raise ValueError(
            f"it has {status.st_size} bytes; the memory of this machine, {memory} bytes, must hold twice that"
        )


def _require_plain_records(path: Path) -> None:
    """Raises ValueError if a zip file unpacks to more than its own size, because torch never compresses records."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return  # torch's older format is no zip file and has no compression
    with zipfile.ZipFile(path) as archive:
        unpacked, size = sum(record.file_size for record in archive.infolist()), path.stat().st_size
    if unpacked > size:
        raise ValueError(f"its {size} bytes unpack to {unpacked}; save the model's state dict with torch.save")


def reason_of(error: Exception) -> str:
    """Returns the kind of an error and its message in one line, without torch's advice to turn `weights_only` off.

    The message is cut to MAX_REASON characters, because it may quote a long name from a stranger's file.
    """
    text, kind = " ".join(str(error).split())[:MAX_REASON], type(error).__name__
    if type(error) is ValueError:
        return text
    if not text or "weights_only" in str(error):
        return kind
    return f"{kind}: {text}"


def name_problems(expected: Set[str], given: Set[str]) -> str:
    """Describes missing and unknown names in a checkpoint for a message. Returns "" if all names are as expected."""
    parts = (("lacks", "missing", expected - given), ("has", "unknown", given - expected))
    problems = [f"{verb} {min(names)[:MAX_REASON]!r} ({len(names)} {kind})" for verb, kind, names in parts if names]
    return " and ".join(problems)


def check_fits(module: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """Raises ValueError unless `state` has the names, shapes and number kinds of `module`. what: its name in errors."""
    expected = module.state_dict()
    problems = name_problems(expected.keys(), state.keys())
    if problems:
        raise ValueError(f"{what} {problems}; it does not belong to this configuration")
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{what} holds {name} with shape {tuple(state[name].shape)}; "
                f"this configuration needs {tuple(tensor.shape)}"
            )
        if tensor.is_floating_point() != state[name].is_floating_point():
            raise ValueError(f"{what} holds {name} as {state[name].dtype}; expected {tensor.dtype}")


def load_strictly(module: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """Loads a state dict. Raises ValueError where `check_fits` does, and for weights that are not finite."""
    check_fits(module, state, what)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not bool(state[name].to(tensor.dtype).isfinite().all()):
            raise ValueError(f"{what} holds numbers in {name} that are not finite in {tensor.dtype}; it is damaged")
    module.load_state_dict(state)
