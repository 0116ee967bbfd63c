# Every target sets itself up: a virtual environment in .venv, made once, made again when the lock changes.
PYTHON ?= python3
UV := 0.13.9
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo photos test unit lint docs wheel reproduce bench proof spice image lock clean

demo: $(READY)
	$(BIN)/raycap run demo

# DATA: a folder of captioned photographs. Writes or replaces photos.yaml and trains with it.
photos: $(READY)
	$(BIN)/raycap init "$(or $(DATA),photographs)" --out photos.yaml --force
	$(BIN)/raycap run photos.yaml

# Two processes, because the tests of clusters wait more than they compute. One process runs a file from start to end.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not proof" --durations=15

unit: $(READY)
	$(BIN)/python -m pytest tests/unit tests/parity

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/unit/test_house.py

# Pages with search in build/docs/index.html, and notebooks of tutorials in build/docs/tutorials. Neither building nor reading them needs a network.
docs: $(READY)
	$(BIN)/python -m sphinx --builder html --conf-dir docs --fresh-env --fail-on-warning --keep-going --quiet . build/docs

# setuptools puts files of earlier builds that are in build/lib into a wheel, too.
wheel: $(READY)
	rm -rf build/lib
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .

# FILES: a folder with a published checkpoint, its vocabulary and COCO; the command names what it lacks.
reproduce: $(READY)
	$(BIN)/raycap reproduce "$(or $(FILES),reproduce)"

# All but benchmarks/serve.py, which needs a model, and `raycap bench gpu`, which needs a GPU.
bench: $(READY)
	for name in models train reward metrics extract; do $(BIN)/python benchmarks/$$name.py || exit; done

# SPICE's models, which no package carries; needs Java and Maven.
spice: $(READY)
	infra/spice.sh $(BIN)/python

# The container image. REGISTRY/ is put before its name. FLAVOR and TORCH_INDEX: see infra/Dockerfile. BASE=raycap-base
# builds everything from packages, where no registry of images can be reached.
image:
	$(if $(filter raycap-base,$(BASE)),infra/base.sh)
	docker build --file infra/Dockerfile --tag $(if $(REGISTRY),$(REGISTRY)/)raycap:0.1.0 --build-arg COMMIT="$$(git describe --always --dirty)" \
	  $(if $(filter raycap-base,$(BASE)),--network host) $(foreach name,BASE FLAVOR TORCH_INDEX,$(if $($(name)),--build-arg $(name)=$($(name)))) .

proof: $(READY)
	$(BIN)/python -m pytest -m proof

# torch and torchvision must come from one place, which one lock installed by one installer sees to. Bytecode is
# compiled here: a run starts a dozen processes, and where PYTHONDONTWRITEBYTECODE is set each compiled torch anew.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "raycap needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV) \
	  && $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -r requirements.lock \
	  || { echo "uv failed (see above); installing the same versions with pip"; $(BIN)/python -m pip install --quiet -r requirements.lock; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

lock:
	$(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --group dev --group docs pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) *.egg-info build
