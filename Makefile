# make demo   runs the main job: real Envoy, real llama.cpp replicas, four policies, a table
# make test   runs every test there is, doing its own set-up
.PHONY: demo demo-serve test bench bench-load docs

demo:
	python3 bench/demo/demo.py

demo-serve:
	python3 bench/demo/demo.py --serve

test:
	bash tests/run.sh

bench:
	cargo bench --bench pick

bench-load:
	python3 bench/load/run.py

docs:
	UPDATE_DOCS=1 cargo test --test it docs
