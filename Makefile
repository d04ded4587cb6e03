# The commands of this project; `make` alone lists them. Everything that is built or downloaded goes to target/ and models/.

.DEFAULT_GOAL := help
.PHONY: help setup setup-checks model test-models vocabularies cuda-compiler build build-cuda demo serve test lint gpu-check bench-server bench-peers bench-offload bench-70b bench-quantise clean-demo

PYTHON ?= python3
TARGET := $(or $(CARGO_TARGET_DIR),target)
STRATA := $(TARGET)/release/strata
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
LISTEN ?= 127.0.0.1:8080
# 92 MiB of tensors against 72 MiB of memory: the device, RAM and storage each hold a share of the weights.
FLAGS ?= --device emulated --device-memory 48MiB --host-memory 24MiB --context 512 --parallel 1
# One profile for everything, so that the dependencies are built once.
CARGO_FLAGS := --release --locked

# rustup's folder, for shells that do not have it on the path yet.
export PATH := $(PATH):$(HOME)/.cargo/bin
export PYTHON
export PYTHONPYCACHEPREFIX := $(abspath $(TARGET))/pycache

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | awk -F '\t' '{ printf "  make %-13s %s\n", $$1, $$2 }'

setup: ## check the tools; install what is missing (Debian packages as root)
	@scripts/setup.sh

setup-checks:
	@scripts/setup.sh --checks

model: setup ## fetch SmolLM2-135M-Instruct (94 MiB, Apache-2.0) into models/
	@$(PYTHON) scripts/fetch_model.py

test-models: setup ## fetch the models that tests compare with a reference: that one, and Gemma 3 270M (241 MiB, Gemma Terms of Use)
	@$(PYTHON) scripts/fetch_model.py smollm2 gemma3-270m

vocabularies: setup ## fetch the vocabularies that the tokenizer is tested with (74 MiB) into models/vocabularies/
	@$(PYTHON) scripts/fetch_vocabularies.py

build: setup ## build target/release/strata
# One of an older build would be handed over to.
	@rm -f $(TARGET)/release/strata-cuda
	cargo build $(CARGO_FLAGS)

cuda-compiler: setup ## fetch nvcc of CUDA 13.0 into target/cuda, unless CUDA_HOME or NVCC names one
	@$(PYTHON) scripts/fetch_cuda_compiler.py

build-cuda: cuda-compiler ## build target/release/strata, and beside it strata-cuda, to which it hands over where there is a GPU
	cargo build $(CARGO_FLAGS) --features cuda

demo: model build ## serve the model across three tiers, ask it something, check what was moved
	@$(PYTHON) scripts/demo.py --strata $(STRATA) --model $(MODEL) -- $(FLAGS)

serve: model build ## the same server in the foreground, on LISTEN (127.0.0.1:8080)
	@printf '\nOnce it is ready, ask from another terminal:\n\n'
	@printf '  curl -N http://%s/v1/chat/completions -H "Content-Type: application/json" \\\n' '$(LISTEN)'
	@printf '    -d '\''{"messages":[{"role":"user","content":"Why is the sky blue?"}],"stream":true}'\''\n\n'
	@exec $(STRATA) serve $(MODEL) $(FLAGS) --listen $(LISTEN)

test: setup-checks ## all that CI runs: format, lints, tests, demo
	@scripts/stage.sh format cargo fmt --all --check
	@scripts/stage.sh scripts $(PYTHON) -m py_compile $(wildcard scripts/*.py benches/*.py)
	@scripts/stage.sh models $(PYTHON) scripts/fetch_model.py smollm2 gemma3-270m
	@scripts/stage.sh vocabularies $(PYTHON) scripts/fetch_vocabularies.py
	@scripts/stage.sh nvcc $(PYTHON) scripts/fetch_cuda_compiler.py
	@scripts/stage.sh clippy cargo clippy $(CARGO_FLAGS) --features cuda --workspace --all-targets -- -D warnings
	@scripts/stage.sh clippy-default cargo clippy $(CARGO_FLAGS) -- -D warnings
	@scripts/stage.sh build cargo build $(CARGO_FLAGS) --features cuda
	@scripts/stage.sh tests cargo test $(CARGO_FLAGS) --features cuda
	@scripts/stage.sh software-gpu cargo test $(CARGO_FLAGS) --package software-gpu
	@scripts/stage.sh cuda-kernels scripts/on_software_gpu.sh cargo test $(CARGO_FLAGS) --features cuda --lib kernels::cuda
	@scripts/stage.sh gpu-check-collect $(PYTHON) scripts/gpu_check.py --collect
	@scripts/stage.sh cuda env STRATA_CANDLE_PTX=$(abspath $(TARGET))/gpu-check/candle.ptx scripts/on_software_gpu.sh cargo test $(CARGO_FLAGS) --features cuda --test cuda --bench gpu
	@scripts/stage.sh gpu-check scripts/on_software_gpu.sh $(PYTHON) scripts/gpu_check.py --small
	@scripts/stage.sh demo $(PYTHON) scripts/demo.py --strata $(STRATA) --model $(MODEL) -- $(FLAGS)

lint: setup-checks ## formatting, clippy and, where they are installed, cargo-deny and shellcheck
	cargo fmt --all --check
	cargo clippy $(CARGO_FLAGS) --workspace --all-targets -- -D warnings
	@if cargo deny --version >/dev/null 2>&1; then cargo deny --locked check; else echo "cargo-deny is not installed: licences not checked"; fi
	@if command -v shellcheck >/dev/null; then shellcheck scripts/*.sh .ci/run; else echo "shellcheck is not installed: shell scripts not checked"; fi

gpu-check: setup cuda-compiler ## on a machine with a GPU: what it reaches beside candle, and the tests of the CUDA device
	@$(PYTHON) scripts/gpu_check.py --collect
	@$(PYTHON) scripts/gpu_check.py

bench-server: model build ## decode and prompt speed beside llama-server, in one run
	$(PYTHON) benches/compare_llama_server.py --strata $(STRATA) --model $(MODEL)

# Takes what peers.py takes: make bench-peers RACE='--only 8b-decode --rounds 3'
bench-peers: model build ## build llama.cpp for this machine; the table of ratios to the peers
	$(PYTHON) benches/peers.py --strata $(STRATA) --vocabulary $(MODEL) $(RACE)

# Takes what offload.py takes: make bench-offload OFFLOAD='--only steps --rounds 3'
bench-offload: model build ## with less memory than the model: beside the drive's rate (fio) and llama.cpp
	$(PYTHON) benches/offload.py --strata $(STRATA) --vocabulary $(MODEL) $(OFFLOAD)

# Takes what quantise.py takes: make bench-quantise QUANTISE='--types q4_k_m --peer native'
bench-quantise: model build ## quantise beside llama.cpp: rate, distance from the weights, and whether it loads the files
	$(PYTHON) benches/quantise.py --strata $(STRATA) --model $(MODEL) $(QUANTISE)

bench-70b: model build ## write a model of 40 GB and serve it from the memory that is there
	$(PYTHON) benches/seventy_billion.py --strata $(STRATA) --vocabulary $(MODEL) $(SEVENTY)

clean-demo: ## remove the models, the vocabularies, the downloads, the peers and the demo's log
	rm -rf $(MODEL) $(MODEL).partial models/gemma3-270m-q4_k_m.gguf models/vocabularies $(TARGET)/downloads $(TARGET)/demo $(TARGET)/pip $(TARGET)/peers $(TARGET)/candle
