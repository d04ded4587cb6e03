# strata on the CPU.
#
#   docker build -t strata .
#   docker run --rm -p 127.0.0.1:8080:8080 -v "$PWD/models:/models:ro" strata serve /models/NAME.gguf
#
# The usual seccomp profile refuses io_uring, and weights are then read by pread, more slowly. For full speed add
# --ulimit memlock=-1 --security-opt seccomp=unconfined (or a profile that allows the three io_uring calls).

FROM rust:1-slim-bookworm AS build
WORKDIR /build
# Dependencies first: this layer is rebuilt only when they change.
COPY Cargo.toml Cargo.lock ./
RUN mkdir src benches && echo 'fn main() {}' | tee src/main.rs benches/attention.rs benches/pool.rs > benches/kernels.rs && touch src/lib.rs \
    && cargo build --release --locked \
    && rm -r src benches
COPY . .
# COPY keeps times: make sure that cargo sees the sources as newer than the placeholders.
RUN touch src/main.rs src/lib.rs && cargo build --release --locked

FROM debian:bookworm-slim
# curl is for the health check.
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --no-create-home strata
COPY --from=build /build/target/release/strata /usr/local/bin/strata
USER strata
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
