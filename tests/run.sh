#!/usr/bin/env bash
# Every check there is, quick and likely to fail first. `make test` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }

say "format and lints"
cargo fmt --check
cargo clippy --quiet --features lab --all-targets -- -D warnings

say "real parts: Envoy, llama.cpp, a tiny model, an OTLP collector, Kubernetes (set up once, then cached)"
python3 bench/demo/parts.py --collector --kubernetes

say "demo driver"
python3 bench/demo/test_demo.py
python3 bench/vllm/test_run.py

say "tests"
cargo test --no-fail-fast --features lab --lib --test it --bin llm-ring-lab
