#!/usr/bin/env bash
# Runs a command with the software GPU in place of the CUDA driver: on_software_gpu.sh COMMAND [ARGUMENT..]. What
# tests/software_gpu/src/driver/settings.rs names may be set beside it.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
cargo build --release --locked --package software-gpu
folder=$(realpath "$target")/software-gpu
mkdir -p "$folder"
for name in libcuda.so libcuda.so.1; do
    ln -sf "$(realpath "$target")/release/libsoftware_gpu.so" "$folder/$name"
done
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# A test that finds no device is a failure here.
export STRATA_REQUIRE_GPU=1
exec "$@"
