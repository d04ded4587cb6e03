# strata on the CPU:
#
#   docker build -t strata .
#   docker run --rm -p 127.0.0.1:8080:8080 -v "$PWD/models:/models:ro" strata serve /models/NAME.gguf
#
# and on a GPU, with NVIDIA's container toolkit, which brings the driver's library into the container:
#
#   docker build -t strata-cuda --target cuda .
#   docker run --rm --gpus all --ulimit memlock=-1 -p 127.0.0.1:8080:8080 -v "$PWD/models:/models:ro" strata-cuda serve /models/NAME.gguf
#
# The usual seccomp profile refuses io_uring, and weights are then read by pread, more slowly. For full speed add
# --ulimit memlock=-1 --security-opt seccomp=unconfined (or a profile that allows the three io_uring calls).

FROM rust:1-slim-bookworm AS build
WORKDIR /build
# Dependencies first: this layer is rebuilt only when they change.
COPY Cargo.toml Cargo.lock ./
COPY tests/software_gpu/Cargo.toml tests/software_gpu/
RUN mkdir src benches tests/software_gpu/src && touch tests/software_gpu/src/lib.rs && echo 'fn main() {}' | tee src/main.rs src/main_cuda.rs benches/attention.rs benches/checksums.rs benches/gpu.rs benches/pool.rs benches/tokenizer.rs > benches/kernels.rs && touch src/lib.rs \
    && cargo build --release --locked \
    && rm -r src benches tests
COPY . .
# COPY keeps times: make sure that cargo sees the sources as newer than the placeholders.
RUN touch src/main.rs src/lib.rs && cargo build --release --locked

FROM build AS build-cuda
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip g++ && rm -rf /var/lib/apt/lists/*
RUN python3 scripts/fetch_cuda_compiler.py && cargo build --release --locked --features cuda

FROM debian:bookworm-slim AS runtime
# curl is for the health check.
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --no-create-home strata \
    && install -d -o strata /var/cache/strata
USER strata
# Where checksums of the model file are kept; a volume at /var/cache/strata keeps them for the next container.
ENV XDG_CACHE_HOME=/var/cache
VOLUME /models
EXPOSE 8080
# Inside a container the port is published (or not) by the engine.
ENV STRATA_LISTEN=0.0.0.0:8080
# A large model takes minutes to load: until then /health answers 503.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD curl --fail --silent --show-error http://127.0.0.1:8080/health
STOPSIGNAL SIGTERM
ENTRYPOINT ["strata"]
CMD ["serve", "/models/model.gguf"]

FROM runtime AS cuda
# What the container toolkit is to bring.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /build/target/release/strata /build/target/release/strata-cuda /usr/local/bin/

# The last one is what `docker build` makes where no target is named.
FROM runtime
COPY --from=build /build/target/release/strata /usr/local/bin/strata
