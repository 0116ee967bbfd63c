#!/usr/bin/env bash
# Fetches SPICE's parser models and, for Java 15 and later, the JavaScript engine that it needs, by their Maven
# coordinates; checks them and puts them where `raycap` looks for them. About 380 MB. Run by `make spice`.
set -euo pipefail
folder="${RAYCAP_SPICE_MODELS:-${XDG_CACHE_HOME:-$HOME/.cache}/raycap/spice}"
python="${1:?the Python that has raycap}"
if ! command -v mvn >/dev/null; then
  echo "make spice needs Maven (the command mvn), which is not on the PATH. Install it, or put these files into" >&2
  echo "$folder by hand: stanford-corenlp-3.6.0.jar, stanford-corenlp-3.6.0-models.jar, nashorn-core-15.4.jar," >&2
  echo "asm-7.3.1.jar, asm-commons-7.3.1.jar, asm-tree-7.3.1.jar, asm-util-7.3.1.jar, asm-analysis-7.3.1.jar" >&2
  exit 2
fi
mkdir -p "$folder"
for artifact in edu.stanford.nlp:stanford-corenlp:3.6.0:jar edu.stanford.nlp:stanford-corenlp:3.6.0:jar:models \
  org.openjdk.nashorn:nashorn-core:15.4:jar org.ow2.asm:asm:7.3.1:jar org.ow2.asm:asm-commons:7.3.1:jar \
  org.ow2.asm:asm-tree:7.3.1:jar org.ow2.asm:asm-util:7.3.1:jar org.ow2.asm:asm-analysis:7.3.1:jar; do
  echo "fetching $artifact"
  # strict: a file whose checksum is not the repository's is refused
  mvn --batch-mode --quiet --strict-checksums \
    org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy -Dartifact="$artifact" -DoutputDirectory="$folder"
done
echo "checking: two captions through SPICE"
RAYCAP_SPICE_MODELS="$folder" "$python" - <<'PYTHON'
import sys

from raycap.pipeline.evaluation.scores.metrics import score_captions

references = {1: ["A red dog runs on the grass."], 2: ["Two men ride brown horses."]}
score = score_captions(references, {1: "a red dog on grass", 2: "a cat"}, metrics=["SPICE"]).by_name["SPICE"]
if score.value is None or not score.per_image[0] > 0.5 or score.per_image[1] != 0:
    sys.exit(f"SPICE does not work yet: {score.unavailable or score.per_image}")
PYTHON
echo "SPICE is ready: $folder"
