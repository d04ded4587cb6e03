#!/usr/bin/env bash
# Check that this machine has what building, the demonstration and (with --checks) the tests need. What is missing is
# installed where that can be done without asking: Debian packages by root, Rust components by rustup.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

can_install_packages() { [ "$(id -u)" -eq 0 ] && have apt-get; }

install_packages() {
    echo "setup: installing Debian packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || echo "setup: the package lists could not be refreshed; trying the ones that are here" >&2
    apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "$@"
}

missing=()
have cc || missing+=(gcc libc6-dev)
have "${PYTHON:-python3}" || missing+=(python3)
# nvcc, with which the tests compile the kernels of the CUDA device, uses the machine's C++ compiler.
[ "${1:-}" != --checks ] || have c++ || missing+=(g++)
if [ "${#missing[@]}" -gt 0 ]; then
    can_install_packages || fail "missing: ${missing[*]}. On Debian or Ubuntu: sudo apt-get install ${missing[*]}"
    install_packages "${missing[@]}" || fail "could not install ${missing[*]}"
fi
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 8))' ||
    fail "Python 3.8 or later is needed: point PYTHON at one (make PYTHON=python3.12 ...)"

rust_minimum=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
how_to_rust="install Rust $rust_minimum or later, for example with rustup (https://rustup.rs)"
if ! have cargo; then
    can_install_packages || fail "cargo is missing: $how_to_rust"
    # Debian's own cargo is too old; its rustup package brings a current one.
    have rustup || install_packages rustup ca-certificates || fail "cargo is missing: $how_to_rust"
    rustup default stable || fail "rustup could not install the stable toolchain: $how_to_rust"
fi
rust_version=$(cargo --version | cut -d ' ' -f 2) || fail "cargo does not run: $how_to_rust"
oldest=$(printf '%s\n' "$rust_minimum" "$rust_version" | sort -V | head -n 1)
[ "$oldest" = "$rust_minimum" ] || fail "cargo is $rust_version: $how_to_rust (rustup update stable)"

if [ "${1:-}" = --checks ]; then
    for component in rustfmt clippy; do
        program=cargo-fmt
        [ "$component" = clippy ] && program=cargo-clippy
        if ! "$program" --version >/dev/null 2>&1; then
            have rustup || fail "$component is missing: install it beside cargo $rust_version"
            rustup component add "$component" || fail "rustup could not add $component"
        fi
    done
fi
