"""The model bundle: a folder with everything that captioning needs, and how Ray's workers get it.

model.safetensors    tensors under "model." and "backbone."
config.yaml          format, name, model, backbone (or null), sizes, protocol, info
vocabulary.json      the words in the order of their ids
preprocessing.json   the image transform, or null for a model of stored features
confidence.json      the confidence in captions (`pipeline.evaluation.confidence`), if it was fitted
digests.json         the SHA-256 of each file above, so that a damaged file is found when the bundle is loaded

A bundle may come from a stranger. It is read without executing anything, opening any other file or asking a server,
and its sizes are compared with those of its tensors before memory is used.

A worker reads the bundle from the storage. If the bundle is only on the driver's disk, which other nodes cannot read,
the worker gets the contents of its files through Ray (`bundle_source`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
from raycap.pipeline.storage.atomic import atomic_folder
from raycap.pipeline.storage.digests import DIGESTS, digests_in, file_digest, memory_bytes, write_digests
from raycap.pipeline.storage.mirror import Mirror
from raycap.pipeline.storage.path import CACHE_VARIABLE, Entry, StoragePath, cache_folder
from raycap.pipeline.storage.untrusted.documents import parse_json, parse_yaml, read_regular_file

if TYPE_CHECKING:
    from raycap.models.captioner import Captioner


FORMAT = 2
# The identity of a run that starts from a bundle contains the digests of these files: the weights and the words.
CONTENT_FILES = ("model.safetensors", "vocabulary.json")
REQUIRED_FILES = ("config.yaml", *CONTENT_FILES)
CONFIDENCE = "confidence.json"
DIGESTED_FILES = (*REQUIRED_FILES, "preprocessing.json", CONFIDENCE)
BUNDLE_FILES = (*DIGESTED_FILES, DIGESTS)
MAX_BYTES = 2**16  # of digests.json and confidence.json
MAX_CONFIG_BYTES = 2**20  # of config.yaml and preprocessing.json
# The limits with which the files are read. The weights are limited by the machine.
FILE_LIMITS = {
    **dict.fromkeys(("config.yaml", "preprocessing.json"), MAX_CONFIG_BYTES),
    "vocabulary.json": MAX_VOCABULARY_BYTES,
    **dict.fromkeys((DIGESTS, CONFIDENCE), MAX_BYTES),
}
# Limits of sizes that cost time or memory and that no tensor in model.safetensors bounds.
MAX_LAYERS = 200  # of the encoder, the decoder and the backbone; published models have 24 or fewer
MAX_STAGES = 8
MAX_IMAGE_SIZE = 4096  # pixels
MAX_POSITIONS = 10_000
MAX_REGIONS = 1000
MAX_MODELS = 1000  # of the ensemble that a protocol names
MAX_COMPUTED_BYTES = 2**30  # tensors that a model computes from its sizes, such as the masks of shifted windows


@dataclass
class Bundle:
    """A loaded bundle. `transform` is None for a model of stored features. `config` is the content of config.yaml.

    confidences: one for each search with which a confidence was fitted. digest: the SHA-256 of the weights.
    """

    captioner: Captioner
    vocabulary: Vocabulary
    transform: ImageTransform | None
    config: Values
    confidences: tuple[Confidence, ...] = ()
    digest: str = ""

    def confidence(self, search: EvaluationSection) -> Confidence | None:
        """The confidence that was fitted with this search; None if there is none."""
        return find_fit(self.confidences, confidence_search(search, self.captioner.model.sizes.max_positions))

    @property
    def search(self) -> EvaluationSection:
        """The settings of a search as the bundle's protocol records them, and the defaults of what it does not."""
        return search_settings(EvaluationSection(), [bundle_protocol(self.config)])

    def changed_search(self, given: Mapping[str, object], search: EvaluationSection | None = None) -> EvaluationSection:
        """A search, by default the recorded one, with the given values of SEARCH_KEYS. Raises UserError."""
        changed = changed_search(search or self.search, given)
        if given:
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

    protocol: says how the model was trained, and by which search it is scored. info: JSON values for config.yaml, such
    as scores, run id and versions.
    """
    from safetensors.torch import save_file

    model, backbone = captioner.model, captioner.backbone
    with atomic_folder(folder) as temporary:
        tensors = {key: value.detach().cpu().contiguous() for key, value in captioner.state_dict().items()}
        save_file(tensors, temporary / "model.safetensors")
        # Loading the bundle must not need the original files of backbone weights and word vectors, because
        # model.safetensors contains both.
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
    """Reads a bundle. The captioner is on the CPU and in evaluation mode.

    digests: the SHA-256 of its files, if the caller has just compared the files with them. Without them, the files are
    compared with digests.json. Raises UserError for a folder that is not a bundle, for files that differ from its
    digests, for another format, and for parts that do not fit together.
    """
    from safetensors.torch import load_file

    from raycap.models.captioner import build_captioner
    from raycap.models.convert.tensor_files import load_strictly

    if missing := [name for name in REQUIRED_FILES if not (folder / name).is_file()]:
        raise UserError(f"{folder} is not a model bundle: it lacks {', '.join(missing)}")
    digests = digests or require_intact(folder)
    config = read_bundle_config(folder)
    vocabulary = _read(folder / "vocabulary.json", Vocabulary.load)
    confidences = read_confidences(folder)
    parts = read_parts(config, str(folder / "config.yaml"))
    if len(vocabulary) != parts.sizes.vocabulary_size:
        raise UserError(
            f"{folder}: vocabulary.json has {len(vocabulary)} words, config.yaml says {parts.sizes.vocabulary_size}"
        )
    transform = None
    if parts.backbone is not None:
        # the recorded transform counts, because another timm may have other statistics
        path, size = folder / "preprocessing.json", parts.backbone.image_size
        transform = _read(path, lambda file: parse_section(ImageTransform, parse_json(_content(file), str(file))))
        if transform.image_size != size:
            raise UserError(f"{path} has image_size = {transform.image_size}, and config.yaml says {size}")
    path = folder / "model.safetensors"
    _read(path, lambda file: _require_room(parts, file))
    captioner = build_captioner(*parts)
    _read(path, lambda file: load_strictly(captioner, load_file(file), str(file)))
    digest = digests.get(path.name) or file_digest(path)
    return Bundle(captioner.eval(), vocabulary, transform, config, confidences, digest)


class BundleParts(NamedTuple):
    """The sections of config.yaml that describe a captioner."""

    model: ModelConfig
    sizes: ModelSizes
    backbone: BackboneConfig | None


def read_bundle_config(folder: Path) -> Values:
    """The content of config.yaml. Raises UserError if it does not have the format that this version reads."""
    path = folder / "config.yaml"
    config = _read(path, lambda file: parse_yaml(_content(file), str(file)))
    version = config.get("format") if isinstance(config, dict) else None
    if not isinstance(version, int) or version < 1:
        raise UserError(f"{path} does not belong to a bundle: it has no format number")
    if version != FORMAT:
        raise UserError(f"{folder} is a bundle of format {version}; this version of raycap reads format {FORMAT} only")
    if not isinstance(config.get("name"), str):
        raise UserError(f"{path}: name must be the model's name, found {type(config.get('name')).__name__}")
    return config | {"name": printable(config["name"])}


def read_confidences(folder: Path) -> tuple[Confidence, ...]:
    """The confidences of a bundle, one for each search; () without any. Raises UserError."""
    path = folder / CONFIDENCE
    if not path.exists():
        return ()
    fits: tuple[Confidence, ...] = _read(
        path, lambda file: parse_confidences(read_regular_file(file, MAX_BYTES), str(file))
    )
    return fits


def store_results(bundle: StoragePath, confidence: Confidence | None, info: Mapping[str, object] = {}) -> None:
    """Adds the results of an evaluation to a bundle, whose local folder is replaced as a whole.

    confidence: replaces the one of the same search; None changes nothing. info: is added to the bundle's info.
    Raises UserError for a damaged bundle, and for one with links or special files: a copy of a stranger's bundle must
    not read or write what they lead to.
    """
    folder = fetched(bundle).resolve()
    require_intact(folder)  # new digests must not hide damage
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
    """The protocol in the content of a bundle's config.yaml; the default one if it has none.

    Raises UserError for a protocol that this version does not have.
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
    """The captioner's description in config.yaml. Raises UserError for values that no bundle of raycap has.

    path: the file, for messages.
    """
    try:
        model = parse_section(ModelSection, config.get("model"), "model")
        sizes = parse_section(ModelSizes, config.get("sizes"), "sizes")
        settings = config.get("backbone")
        backbone = None if settings is None else parse_section(BackboneConfig, settings, "backbone")
        search_settings(EvaluationSection(), [bundle_protocol(config)])
    except UserError as error:
        raise UserError(f"{path}: {one_line(error)}") from error
    limits = {
        "model.num_encoder_layers": (model.num_encoder_layers, MAX_LAYERS),
        "model.num_decoder_layers": (model.num_decoder_layers, MAX_LAYERS),
        "model.attended_regions": (getattr(model, "attended_regions", None) or 0, MAX_REGIONS),
        "sizes.max_positions": (sizes.max_positions, MAX_POSITIONS),
    }
    files: dict[str, tuple[str | None, str | None]] = {"model.word_vectors": (model.word_vectors, None)}
    if backbone is not None:
        depths = backbone.depths or ()
        limits["the number of backbone.depths"] = (len(depths), MAX_STAGES)
        limits["the sum of backbone.depths"] = (sum(map(abs, depths)), MAX_LAYERS)
        limits["backbone.image_size"] = (backbone.image_size, MAX_IMAGE_SIZE)
        files["backbone.weights"] = (backbone.weights, "none")
    for key, (value, most) in limits.items():
        if value > most:
            raise UserError(f"{path}: {key} is {value}; a bundle may have at most {most}")
    for key, (name, expected) in files.items():
        if name != expected:
            raise UserError(f"{path}: {key} is {quoted(name)}; a bundle contains its weights and opens no other file")
    return BundleParts(model, sizes, backbone)


def _require_room(parts: BundleParts, path: Path) -> None:
    """Raises ValueError unless the file has the tensors of the captioner, and the captioner needs little more memory.

    Neither the tensors nor the captioner take memory here, and the state of the random generator does not change.
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
    """The local folder of a bundle. For a bundle on S3 it is a local copy, which is brought up to date first.

    Raises UserError, before anything is fetched, for a file that is larger than what would be read, or than the disk.
    """
    if not bundle.is_remote:
        return bundle.path
    copy = cache_folder() / "bundles" / hashlib.sha256(bundle.uri.encode()).hexdigest()[:20]
    Mirror(bundle, copy).pull(only=BUNDLE_FILES, check=lambda files: _check_sizes(bundle, files))
    return copy


def _check_sizes(bundle: StoragePath, files: Mapping[str, Entry]) -> None:
    """Raises UserError if one of the files to fetch is larger than its limit, or their sum than the free disk."""
    for name, entry in files.items():
        size, limit = entry.size, FILE_LIMITS.get(name, memory_bytes())
        if size > limit:
            kind = "such a file may have" if name in FILE_LIMITS else "this machine has as memory"
            raise UserError(f"{bundle / name} has {size} bytes, more than the {limit} that {kind}; give another bundle")
    size, free = sum(entry.size for entry in files.values()), shutil.disk_usage(cache_folder()).free
    if size > free:
        raise UserError(
            f"{bundle}: {size} bytes are to be copied to {cache_folder()}, more than the {free} that are free there; "
            f"make room, or name a folder on a larger disk by {CACHE_VARIABLE}"
        )


def bundle_digests(folder: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """{file: sha256} of the named files of a bundle, by default of all. UserError when one of them is missing."""
    # For an empty folder, the error below names a file that every bundle needs.
    names = names or [name for name in BUNDLE_FILES if (folder / name).is_file()] or CONTENT_FILES
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"{folder} is not a model bundle: it lacks {missing[0]}; give the folder of a bundle")
    return {name: file_digest(folder / name) for name in names}


def seal(folder: Path) -> None:
    """Writes digests.json for the other files of a bundle."""
    (folder / DIGESTS).unlink(missing_ok=True)
    write_digests(folder, [name for name in DIGESTED_FILES if (folder / name).is_file()])


def require_intact(folder: Path) -> Mapping[str, str]:
    """The SHA-256 of each file by name. Raises UserError if a file differs from digests.json.

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


def _read(path: Path, parse: Callable[[Path], Any]) -> Any:
    """The content of a file of a bundle. Raises UserError with the file's path if `parse` fails."""
    from safetensors import SafetensorError

    try:
        return parse(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error).replace(str(path), 'it', 1)}") from error


def _yaml(config: Mapping[str, object]) -> str:
    """The text of config.yaml. YAML's safe dumper accepts no tuples, which JSON turns into lists."""
    return yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class StoredBundle:
    """A bundle in the storage. If `digests` (sha256 by file name) are given, its files are compared with them."""

    location: StoragePath
    digests: Mapping[str, str] = field(default_factory=dict)

    def fetch(self) -> Path:
        """The local folder of the bundle. Raises OSError when a file is missing or does not have its digest."""
        folder = fetched(self.location)
        for name, digest in self.digests.items():
            if not (folder / name).is_file() or file_digest(folder / name) != digest:
                raise OSError(f"{self.location / name} is missing or has changed; restore the bundle from a copy")
        return folder

    def load(self) -> Bundle:
        """The model from the storage. Raises OSError like `fetch`."""
        return load_bundle(self.fetch(), self.digests)


@dataclass(frozen=True)
class SentBundle:
    """A bundle that is only on the driver's disk. Workers get its files through Ray's object store."""

    files: Any  # a reference in Ray's object store to {file name: bytes}

    @classmethod
    def of(cls, folder: Path) -> SentBundle:
        """Copies the whole bundle to Ray's object store. Ray must have been started."""
        import ray

        return cls(ray.put({name: (folder / name).read_bytes() for name in BUNDLE_FILES if (folder / name).is_file()}))

    def load(self) -> Bundle:
        """The model from Ray's object store, by way of a temporary folder."""
        import ray

        with tempfile.TemporaryDirectory(prefix="raycap-bundle-") as folder:
            for name, content in ray.get(self.files).items():
                (Path(folder) / name).write_bytes(content)
            return load_bundle(Path(folder))


ModelSource = StoredBundle | SentBundle  # from which a worker loads a model; Ray pickles it into its tasks


def bundle_source(bundle: StoragePath, config: RunConfig) -> ModelSource:
    """The source from which workers load a bundle.

    With a local storage, all nodes share a disk and can read the bundle there. With a storage on S3 they share no disk:
    a bundle that is only on the driver's disk is then sent through Ray, which must have been started. Workers refuse a
    bundle on S3 that differs from the one that this process has checked.
    """
    if bundle.is_remote:
        return StoredBundle(bundle, bundle_digests(fetched(bundle)))
    if not config.storage_place.is_remote:
        return StoredBundle(bundle)
    if bundle.path.is_relative_to(config.working_path):  # a local copy of a bundle on S3
        place = config.storage_place / bundle.path.relative_to(config.working_path).as_posix()
        return StoredBundle(place, bundle_digests(bundle.path))
    return SentBundle.of(bundle.path)
