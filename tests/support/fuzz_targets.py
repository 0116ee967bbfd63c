"""The table of fuzz targets. All together take about 20 minutes on one CPU core, most of it for configurations."""

from __future__ import annotations

from tests.support import fuzz_documents as documents
from tests.support import fuzz_models as models
from tests.support.fuzzing import Target

# 27 configurations are shipped, and each has 1,000 cases.
TARGETS: dict[str, Target] = {
    "configurations": Target(documents.config_files, documents.configuration, 27_000),
    "command_lines": Target(
        documents.small_inputs, documents.command_line, 100, writes=("results",), starts_programs=True
    ),
    "annotations": Target(documents.gzip_bomb, documents.annotations, 1_800),
    "archives": Target(documents.archive_files, documents.archive, 1_500),
    "data_sets": Target(documents.small_inputs, documents.data_set, 300, writes=("storage",)),
    "result_files": Target(models.nothing, documents.result_files, 800),
    "detections": Target(documents.small_inputs, documents.detections, 1_000),
    "constraint_files": Target(models.nothing, documents.constraint_files, 800),
    "word_vectors": Target(models.nothing, documents.word_vectors, 1_000),
    "checkpoints": Target(models.upstream, models.checkpoint, 600),
    "bundles": Target(models.bundle_folder, models.bundle, 600),
    "requests": Target(models.service, models.request, 800, (ValueError,)),
    "regions": Target(models.region_data, models.regions, 800, writes=("storage",)),
    "images": Target(models.image_files, models.image, 6_000),
    "runs": Target(models.stopped_run, models.run_state, 150, writes=("storage",)),
    "leases": Target(models.nothing, models.retraining_state, 1_000, writes=("lease.json", ".lease.json")),
}
