# make demo   runs the main job: real Envoy, real llama.cpp replicas, four policies, a table
# make kind-demo   the example of k8s/ in a kind cluster, with an engine added half way
# make experiments   makes docs/experiments.md again, every number and chart of it; ARGS=--check only compares
# make test-vllm   predicted against delivered cached tokens on two real vLLM engines; skipped, and says so, without vLLM; ARGS=--install brings it (6 GB)
# make test   runs every test there is, doing its own set-up
.PHONY: demo demo-serve kind-demo test bench bench-load docs experiments test-vllm

demo:
	python3 bench/demo/demo.py

demo-serve:
	python3 bench/demo/demo.py --serve

kind-demo:
	bash cluster/kind-demo.sh

test:
	bash tests/run.sh

bench:
	cargo bench --bench pick

bench-load:
	python3 bench/load/run.py

docs:
	UPDATE_DOCS=1 cargo test --test it docs

experiments:
	cargo run --quiet --release --features lab --bin llm-ring-lab -- experiments $(ARGS)

test-vllm:
	python3 bench/vllm/run.py $(ARGS)
