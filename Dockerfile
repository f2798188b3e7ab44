# The picker's image: docker build -t llm-ring .
# What the last stage looks like without a container engine: tests/image.sh.

FROM docker.io/library/rust:1.95-bookworm AS build
WORKDIR /src
# The dependencies, in a layer of their own: it is built again only when they change. (Their C parts, ring and zstd,
# need the C compiler that this base has; nothing needs protoc.)
COPY Cargo.toml Cargo.lock ./
RUN mkdir src \
 && echo 'fn main() {}' | tee build.rs >src/main.rs \
 && touch src/lib.rs \
 && cargo build --release --locked --bin llm-ring
COPY build.rs ./
COPY proto proto
COPY src src
# COPY keeps the files' times, and to cargo an old file is one that it has built already.
RUN touch build.rs src/lib.rs src/main.rs \
 && cargo build --release --locked --bin llm-ring \
 && strip --strip-debug target/release/llm-ring

# glibc, libgcc and CA certificates; no shell, no package manager, and a user 65532.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /src/target/release/llm-ring /llm-ring
# ext_proc, health, metrics.
EXPOSE 9002 9003 9090
ENTRYPOINT ["/llm-ring"]
