"""The model bundle, a folder with everything that captioning needs, and how bundles are written, checked and loaded.

model.safetensors    tensors under "model." and "backbone."
config.yaml          format, name, model, backbone (or null), sizes, protocol, info
vocabulary.json      the words in the order of their ids
preprocessing.json   the image transform, or null for a model of stored features
confidence.json      the confidence in captions (`pipeline.evaluation.confidence`), if it was fitted
digests.json         the SHA-256 of each file above, by which damage is found when the bundle is loaded

A bundle may come from a stranger. So loading it executes no code, opens no other file and asks no server, and the sizes
in config.yaml are compared with those of the tensors before memory is allocated.

A worker reads the bundle from the storage. If the bundle is only on the driver's disk, which other nodes cannot read,
the worker gets the contents of its files through Ray (`bundle_source`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from raycap.models.config import BackboneConfig, ModelConfig, ModelSizes, Values
from raycap.models.encoders.transform import ImageTransform
from raycap.pipeline.config.languages import code_problem
from raycap.pipeline.config.load import parse_section
from raycap.pipeline.config.run import RunConfig
from raycap.pipeline.config.sections import EvaluationSection, ModelSection
from raycap.pipeline.data.vocabulary import MAX_BYTES as MAX_VOCABULARY_BYTES
from raycap.pipeline.data.vocabulary import Vocabulary
from raycap.pipeline.errors import DamagedError, UserError
from raycap.pipeline.evaluation.comparison.protocol import (
    Protocol,
    changed_search,
    confidence_search,
    model_protocol,
    search_settings,
)
from raycap.pipeline.evaluation.confidence import (
    Confidence,
    dump_confidences,
    find_fit,
    parse_confidences,
    with_fit,
)
from raycap.pipeline.runtime.names import one_line, printable, quoted
from raycap.pipeline.storage.atomic import atomic_folder, require_writable
from raycap.pipeline.storage.digests import DIGESTS, digests_in, file_digest, memory_bytes, write_digests
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import CACHE_VARIABLE, Entry, StoragePath, cache_folder
from raycap.pipeline.storage.untrusted.documents import parse_json, parse_yaml, read_regular_file
from raycap.pipeline.storage.weights import save_weights

if TYPE_CHECKING:
    from raycap.models.captioner import Captioner


FORMAT = 2
# The weights and the words. If a run starts from a bundle, the run's identity contains the digests of these files.
CONTENT_FILES = ("model.safetensors", "vocabulary.json")
REQUIRED_FILES = ("config.yaml", *CONTENT_FILES)
CONFIDENCE = "confidence.json"
DIGESTED_FILES = (*REQUIRED_FILES, "preprocessing.json", CONFIDENCE)
BUNDLE_FILES = (*DIGESTED_FILES, DIGESTS)
MAX_BYTES = 2**16  # of digests.json and confidence.json
MAX_CONFIG_BYTES = 2**20  # of config.yaml and preprocessing.json
# The largest size in bytes of each file. The weights have no entry, because the machine's memory limits them.
FILE_LIMITS = {
    **dict.fromkeys(("config.yaml", "preprocessing.json"), MAX_CONFIG_BYTES),
    "vocabulary.json": MAX_VOCABULARY_BYTES,
    **dict.fromkeys((DIGESTS, CONFIDENCE), MAX_BYTES),
}
MAX_MODELS = 1000  # in the ensemble of a protocol
MAX_COMPUTED_BYTES = 2**30  # of tensors that a model computes from its sizes, such as the masks of shifted windows


@dataclass
class Bundle:
    """A loaded bundle.

    transform: the image transform, or None if the model captions stored features. config: the content of config.yaml.
    confidences: one per search with which a confidence was fitted. digest: the SHA-256 of the weights' file.
    """

    captioner: Captioner
    vocabulary: Vocabulary
    transform: ImageTransform | None
    config: Values
    confidences: tuple[Confidence, ...] = ()
    digest: str = ""

    def confidence(self, search: EvaluationSection) -> Confidence | None:
        """The confidence that was fitted with this search, or None if there is none."""
        return find_fit(self.confidences, confidence_search(search, self.captioner.model.sizes.max_positions))

    @property
    def search(self) -> EvaluationSection:
        """The settings of a search from the bundle's protocol, with defaults for settings that it does not record."""
        return search_settings(EvaluationSection(), [bundle_protocol(self.config)])

    def changed_search(self, given: Mapping[str, object], search: EvaluationSection | None = None) -> EvaluationSection:
        """The search, or by default the recorded one, with the given values of SEARCH_KEYS. Raises UserError.

        Values that are None change nothing.
        """
        changes = {key: value for key, value in given.items() if value is not None}
        changed = changed_search(search or self.search, changes)
        if changes:
            changed.require_words(bundle_protocol(self.config).language, self.vocabulary.tokenizer)
        return changed


def save_bundle(
    folder: Path,
    captioner: Captioner,
    vocabulary: Vocabulary,
    *,
    name: str,
    protocol: Protocol = Protocol(),
    info: Mapping[str, object],
) -> None:
    """Writes a bundle atomically. An older bundle in `folder` is removed only after the new one is complete.

    protocol: how the model was trained, and with which search it is scored. info: JSON values for config.yaml, such as
    scores, run id and versions.
    """
    model, backbone = captioner.model, captioner.backbone
    with atomic_folder(folder) as temporary:
        save_weights(captioner, temporary / "model.safetensors")
        # model.safetensors contains the backbone's weights and the word vectors, so the configuration does not name
        # their original files, which the loading machine may lack.
        config = {
            "format": FORMAT,
            "name": name,
            "model": asdict(model.config) | {"word_vectors": None},
            "backbone": None if backbone is None else backbone.config.feature_settings() | {"weights": "none"},
            "sizes": asdict(model.sizes),
            "protocol": asdict(protocol),
            "info": dict(info),
        }
        (temporary / "config.yaml").write_text(_yaml(config), encoding="utf-8")
        vocabulary.save(temporary / "vocabulary.json")
        transform = None if backbone is None else asdict(backbone.transform)
        (temporary / "preprocessing.json").write_text(json.dumps(transform, indent=2), encoding="utf-8")
        seal(temporary)


def load_bundle(folder: Path, digests: Mapping[str, str] = {}) -> Bundle:
    """Loads a bundle. The captioner is on the CPU and in evaluation mode.

    digests: the SHA-256 of its files, if the caller has just checked the files. If it is empty, the files are checked
    against digests.json. Raises UserError if the folder is not a bundle, its files differ from the digests, its format
    is another one, or its parts do not fit together.
    """
    from safetensors.torch import load_file

    from raycap.models.captioner import build_captioner
    from raycap.models.convert.tensor_files import load_strictly

    if missing := [name for name in REQUIRED_FILES if not (folder / name).is_file()]:
        raise UserError(f"{folder} is not a model bundle: it lacks {', '.join(missing)}")
    digests = digests or require_intact(folder)
    config = read_bundle_config(folder)
    parts = read_parts(config, str(folder / "config.yaml"))
    confidences = read_confidences(folder)
    with _naming(folder / "vocabulary.json") as path:
        vocabulary = Vocabulary.load(path)
    if len(vocabulary) != parts.sizes.vocabulary_size:
        raise UserError(
            f"{folder}: vocabulary.json has {len(vocabulary)} words, config.yaml says {parts.sizes.vocabulary_size}"
        )
    transform = None
    if parts.backbone is not None:
        # the recorded transform is used, because another version of timm may have other statistics
        with _naming(folder / "preprocessing.json") as path:
            transform = parse_section(ImageTransform, parse_json(_content(path), str(path)))
        size = parts.backbone.image_size
        if transform.image_size != size:
            raise UserError(f"{path} has image_size = {transform.image_size}, and config.yaml says {size}")
    with _naming(folder / "model.safetensors") as weights:
        _require_room(parts, weights)
        captioner = build_captioner(*parts)
        load_strictly(captioner, load_file(weights), str(weights))
    digest = digests.get(weights.name) or file_digest(weights)
    return Bundle(captioner.eval(), vocabulary, transform, config, confidences, digest)


class BundleParts(NamedTuple):
    """The sections of config.yaml that describe a captioner."""

    model: ModelConfig
    sizes: ModelSizes
    backbone: BackboneConfig | None


def read_bundle_config(folder: Path) -> Values:
    """The content of config.yaml. Raises UserError if it is malformed or has another format than FORMAT."""
    with _naming(folder / "config.yaml") as path:
        config = parse_yaml(_content(path), str(path))
    version = config.get("format") if isinstance(config, dict) else None
    if version != FORMAT:
        raise UserError(f"{path} has format {quoted(version)}; this version of raycap reads format {FORMAT} only")
    if not isinstance(config.get("name"), str):
        raise UserError(f"{path}: name must be the model's name, found {type(config.get('name')).__name__}")
    return config | {"name": printable(config["name"])}


def read_confidences(folder: Path) -> tuple[Confidence, ...]:
    """The confidences of a bundle, one per search, or () if none was fitted. Raises UserError for a malformed file."""
    if not (folder / CONFIDENCE).exists():
        return ()
    with _naming(folder / CONFIDENCE) as path:
        return parse_confidences(read_regular_file(path, MAX_BYTES), str(path))


def store_results(bundle: StoragePath, confidence: Confidence | None, info: Mapping[str, object] = {}) -> None:
    """Adds the results of an evaluation to a bundle. Its local folder is replaced atomically.

    confidence: replaces the confidence of the same search. If it is None, the confidences do not change. info: is added
    to the bundle's info. Raises UserError if the bundle is damaged, or if it contains links or special files, because
    copying a stranger's bundle must not read or write the files to which they lead.
    """
    folder = fetched(bundle).resolve()
    require_intact(folder)  # before new digests are written, which would hide damage
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(
                f"{quoted(path)} is a link or a special file, and a confidence is stored in bundles of plain files "
                "only; copy the files"
            )
    config = read_bundle_config(folder)
    with atomic_folder(folder) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)
        if confidence is not None:
            fits = with_fit(read_confidences(folder), confidence)
            (temporary / CONFIDENCE).write_text(dump_confidences(fits), encoding="utf-8")
        if info:
            config["info"] |= info
            (temporary / "config.yaml").write_text(_yaml(config), encoding="utf-8")
        seal(temporary)
    if bundle.is_remote:
        Mirror(bundle, folder).push()


def bundle_protocol(config: Mapping[str, object]) -> Protocol:
    """The protocol in the content of a bundle's config.yaml, or the default protocol if it has none.

    Raises UserError for a protocol with unknown fields or values.
    """
    model = parse_section(ModelSection, config.get("model"), "model")
    recorded = config.get("protocol")
    protocol = parse_section(Protocol, {} if recorded is None else recorded, "protocol")
    if not 0 <= protocol.num_models <= MAX_MODELS:
        raise UserError(f"protocol.num_models is {protocol.num_models}; expected 0 to {MAX_MODELS}")
    if problem := code_problem(protocol.language):
        raise UserError(f"protocol.language: {quoted(protocol.language)} {problem}")
    attends_padding = model_protocol(model, regions=protocol.features == "regions").attend_padding
    return replace(protocol, system=model.name, attend_padding=attends_padding)


def read_parts(config: Mapping[str, object], path: str) -> BundleParts:
    """The description of the captioner in the content of config.yaml. path: the file, for messages.

    Raises UserError for invalid values, also those above the limits of `models.config`, and for names of other files.
    """
    try:
        model = parse_section(ModelSection, config.get("model"), "model")
        sizes = parse_section(ModelSizes, config.get("sizes"), "sizes")
        settings = config.get("backbone")
        backbone = None if settings is None else parse_section(BackboneConfig, settings, "backbone")
        search_settings(EvaluationSection(), [bundle_protocol(config)])
    except UserError as error:
        raise UserError(f"{path}: {one_line(error)}") from error
    other_files = {"model.word_vectors": model.word_vectors}
    if backbone is not None and backbone.weights != "none":
        other_files["backbone.weights"] = backbone.weights
    for key, file in other_files.items():
        if file is not None:
            raise UserError(f"{path}: {key} is {quoted(file)}; a bundle contains its weights and opens no other file")
    return BundleParts(model, sizes, backbone)


def _require_room(parts: BundleParts, path: Path) -> None:
    """Raises ValueError if the file's tensors are not the captioner's, or the captioner needs much memory beyond them.

    The captioner is built on torch's meta device, which takes no memory and leaves the random generator unchanged.
    """
    import torch

    from raycap.models.captioner import build_captioner
    from raycap.models.convert.tensor_files import check_file

    try:
        with torch.device("meta"):
            plan = build_captioner(*parts)
    except Exception as error:  # torch and timm refuse sizes with errors of many kinds
        raise ValueError(f"a captioner with the sizes of config.yaml cannot be built: {one_line(error)}") from error
    check_file(path, plan)
    stored = {id(tensor) for tensor in plan.state_dict(keep_vars=True).values()}
    computed = sum(tensor.nbytes for tensor in plan.buffers() if id(tensor) not in stored)
    if computed > MAX_COMPUTED_BYTES:
        raise ValueError(
            f"the sizes of config.yaml need {computed} bytes of masks and tables; {MAX_COMPUTED_BYTES} is the limit"
        )


def fetched(bundle: StoragePath) -> Path:
    """The local folder of a bundle. A bundle on S3 is copied to the cache, or its copy there is updated.

    Raises UserError before anything is copied if a file is above its limit, or the disk has too little room.
    """
    if not bundle.is_remote:
        return bundle.path
    require_writable(CACHE_VARIABLE, cache_folder())
    copy = cache_folder() / "bundles" / hashlib.sha256(bundle.uri.encode()).hexdigest()[:20]
    Mirror(bundle, copy).pull(only=BUNDLE_FILES, check=lambda files: _check_sizes(bundle, files))
    return copy


def _check_sizes(bundle: StoragePath, files: Mapping[str, Entry]) -> None:
    """Raises UserError if a file to fetch is above its limit, or if all of them do not fit on the disk."""
    for name, entry in files.items():
        limit = FILE_LIMITS.get(name, memory_bytes())
        if entry.size > limit:
            kind = "such a file may have" if name in FILE_LIMITS else "this machine has as memory"
            problem = f"has {entry.size} bytes, more than the {limit} that {kind}"
            raise UserError(f"{bundle / name} {problem}; give another bundle")
    total, free = sum(entry.size for entry in files.values()), shutil.disk_usage(cache_folder()).free
    if total > free:
        raise UserError(
            f"{bundle}: {total} bytes are to be copied to {cache_folder()}, more than the {free} that are free there; "
            f"make room, or name a folder on a larger disk by {CACHE_VARIABLE}"
        )


def bundle_digests(folder: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """{file: SHA-256} of the named files of a bundle, by default of all files. Raises UserError if one is missing."""
    expected = names or REQUIRED_FILES
    if missing := [name for name in expected if not (folder / name).is_file()]:
        raise UserError(f"{folder} is not a model bundle: it lacks {missing[0]}; give the folder of a bundle")
    present = names or [name for name in BUNDLE_FILES if (folder / name).is_file()]
    return {name: file_digest(folder / name) for name in present}


def seal(folder: Path) -> None:
    """Writes digests.json with the SHA-256 of the bundle's other files."""
    (folder / DIGESTS).unlink(missing_ok=True)
    write_digests(folder, [name for name in DIGESTED_FILES if (folder / name).is_file()])


def require_intact(folder: Path) -> Mapping[str, str]:
    """Checks a bundle's files against digests.json, and returns {file: SHA-256}. Raises UserError if a file differs.

    A bundle without digests.json is not checked, and the result is empty.
    """
    if not (folder / DIGESTS).exists():
        return {}
    try:
        recorded = digests_in(read_regular_file(folder / DIGESTS, MAX_BYTES), str(folder / DIGESTS))
    except (DamagedError, OSError) as error:
        raise UserError(f"{folder / DIGESTS} cannot be read: {one_line(error)}; restore it") from error
    if not set(REQUIRED_FILES) <= recorded.keys() <= set(DIGESTED_FILES):
        raise UserError(f"{folder / DIGESTS} is damaged: it must have the digests of a bundle's files; restore it")
    remedy = f"restore the bundle, remove {DIGESTS} if the change is yours, or remove it all and repeat `raycap run`"
    for name in DIGESTED_FILES:
        file = folder / name
        if name in recorded and not file.is_file():
            raise UserError(f"{folder} lacks {name}, which is in its {DIGESTS}; {remedy}")
        if file.is_file() and recorded.get(name) != file_digest(file):
            raise UserError(f"{file} does not have the digest in {DIGESTS}: it is damaged or changed; {remedy}")
    return recorded


def _content(path: Path) -> bytes:
    return read_regular_file(path, MAX_CONFIG_BYTES)


@contextmanager
def _naming(path: Path) -> Iterator[Path]:
    """Within the context, turns an error of reading a bundle's file into a UserError with its path. Yields the path."""
    from safetensors import SafetensorError

    try:
        yield path
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error).replace(str(path), 'it', 1)}") from error


def _yaml(config: Mapping[str, object]) -> str:
    """The text of config.yaml. JSON first turns tuples into lists, because YAML's safe dumper accepts no tuples."""
    return yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class StoredBundle:
    """A bundle in the storage. digests: {file: SHA-256} against which its files are checked, or {} for no check."""

    location: StoragePath
    digests: Mapping[str, str] = field(default_factory=dict)

    def fetch(self) -> Path:
        """The local folder of the bundle. Raises OSError if a file is missing or does not have its digest."""
        folder = fetched(self.location)
        for name, digest in self.digests.items():
            if not (folder / name).is_file() or file_digest(folder / name) != digest:
                raise OSError(f"{self.location / name} is missing or has changed; restore the bundle from a copy")
        return folder

    def load(self) -> Bundle:
        """Loads the bundle from the storage. Raises OSError like `fetch`."""
        return load_bundle(self.fetch(), self.digests)


@dataclass(frozen=True)
class SentBundle:
    """A bundle that is only on the driver's disk. Workers get its files through Ray's object store."""

    files: Any  # a reference in Ray's object store to {file name: bytes}

    @classmethod
    def of(cls, folder: Path) -> SentBundle:
        """Copies the bundle's files to Ray's object store. Ray must have been started."""
        import ray

        return cls(ray.put({name: (folder / name).read_bytes() for name in BUNDLE_FILES if (folder / name).is_file()}))

    def load(self) -> Bundle:
        """Loads the bundle from Ray's object store, through a temporary folder."""
        import ray

        with tempfile.TemporaryDirectory(prefix="raycap-bundle-") as folder:
            for name, content in ray.get(self.files).items():
                (Path(folder) / name).write_bytes(content)
            return load_bundle(Path(folder))


ModelSource = StoredBundle | SentBundle  # what Ray pickles into each task, so that a worker can load the model


def bundle_source(bundle: StoragePath, config: RunConfig) -> ModelSource:
    """The source from which workers load a bundle.

    If the storage is local, all nodes share a disk and read the bundle there. If the storage is on S3, nodes share no
    disk, so a bundle that is only on the driver's disk is sent through Ray, which must have been started. Workers
    refuse a bundle on S3 that differs from the one that this process has checked.
    """
    if bundle.is_remote:
        return StoredBundle(bundle, bundle_digests(fetched(bundle)))
    if not config.storage_place.is_remote:
        return StoredBundle(bundle)
    if bundle.path.is_relative_to(config.working_path):  # a local copy of a bundle on S3
        place = config.storage_place / bundle.path.relative_to(config.working_path).as_posix()
        return StoredBundle(place, bundle_digests(bundle.path))
    return SentBundle.of(bundle.path)
