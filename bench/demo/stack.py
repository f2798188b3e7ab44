"""The running stack: three engines, the picker, Envoy; started together, and ended whatever happens."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import string
import subprocess
import sys
import time
from pathlib import Path

from parts import HERE
from steps import Failure, uninterrupted

REPLICAS = 3
# Room for the chats that live on one replica, and not for a copy of every chat on each: about 6
# of the 12 chats in slots or in the store (1 KiB a token).
SLOTS, CONTEXT, CACHE_RAM_MIB = 4, 16384, 6
START_SECONDS = 30.0
END_SECONDS = 2.0

PICKER_CONFIG = string.Template("""\
server: { address: 127.0.0.1, grpc_port: $picker_port, health_port: $health_port, metrics_port: $metrics_port }
tls: { mode: "off" }
endpoints: { file: $endpoints }
policy: $policy
policies:
  bounded:   { load: requests, epsilon: 0.25 }
  llm-aware: { epsilon: 0.25, long_epsilon: 1.0, long_threshold_tokens: 800 }
log: { format: json, decisions: true }
drain: { linger_seconds: 0 }
""")


def free_ports(count):
    """Ports that nobody listens on; held all at once, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def answers(port, path, host="127.0.0.1"):
    connection = http.client.HTTPConnection(host, port, timeout=1)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Child:
    """A process in a session of its own, so that its group can be ended whole."""

    def __init__(self, name, command, log, ready, env=None):
        self.name, self.log, self.ready, self.env = name, log, ready, env
        self.command = command = [str(c) for c in command]
        try:
            with open(log, "wb") as output:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True, env=env,
                )  # fmt: skip
        except OSError as problem:
            raise Failure(f"could not start {name}: {problem}") from None

    def check(self):
        if self.process.poll() is not None:
            raise Failure(f"{self.name} ended with {self.process.returncode}; the end of its log:\n{self.tail()}")

    def tail(self):
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join("  " + line for line in lines) or "  (it said nothing)"

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class Stack:
    """A context: inside it everything is ready, after it nothing is left running."""

    engine_ports, start_seconds = REPLICAS, START_SECONDS

    def __init__(self, parts, picker, policy, folder):
        self.parts, self.picker, self.policy, self.folder = parts, picker, policy, Path(folder)
        self.children = []

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with uninterrupted():
                self.start()
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        ports = free_ports(5 + self.engine_ports)
        self.http_port, self.metrics_port, self.health_port, self.grpc_port, self.admin_port, *engines = ports
        self.start_engines(engines)
        self.config = self.write("llm-ring.yaml", self.settings())
        self.add("llm-ring", [self.picker, "serve", "--config", self.config], (self.metrics_port, "/readyz"))
        gateway = string.Template((HERE / "envoy.yaml").read_text()).substitute(
            http_port=self.http_port, admin_port=self.admin_port, picker_port=self.grpc_port
        )
        command = [self.parts["ENVOY"], "--config-path", self.write("envoy.yaml", gateway)]
        # Without --disable-hot-restart two Envoys on one machine are one too many.
        command += ["--concurrency", 1, "--log-level", "warning", "--disable-hot-restart"]
        self.add("envoy", command, (self.admin_port, "/ready"))

    def start_engines(self, ports):
        self.engines = {f"llama-{i}": port for i, port in enumerate(ports)}
        interpreter = self.parts.get("LLAMA_PYTHON", sys.executable)
        environment = dict(os.environ)
        if "LLAMA_SERVER" in self.parts:
            environment["LLAMA_SERVER"] = self.parts["LLAMA_SERVER"]
        for name, port in self.engines.items():
            command = [interpreter, HERE / "engine.py", self.parts["MODEL"], port, SLOTS, CONTEXT, CACHE_RAM_MIB]
            self.add(name, command, (port, "/health"), environment)

    def settings(self):
        """The text of the picker's configuration."""
        endpoints = self.write(
            "endpoints.yaml",
            "endpoints:\n"
            + "".join(
                f"- {{ name: {name}, address: 127.0.0.1, port: {port}, engine: llama.cpp }}\n"
                for name, port in self.engines.items()
            ),
        )
        return PICKER_CONFIG.substitute(
            policy=self.policy, endpoints=json.dumps(str(endpoints)), picker_port=self.grpc_port,
            health_port=self.health_port, metrics_port=self.metrics_port,
        )  # fmt: skip

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path

    def add(self, name, command, ready, env=None):
        self.children.append(Child(name, command, self.log(name), ready, env))

    def log(self, name):
        return self.folder / f"{name}.log"

    def check(self):
        for child in self.children:
            child.check()

    def wait(self):
        deadline = time.monotonic() + self.start_seconds
        for child in self.children:
            while not answers(*child.ready):
                self.check()
                if time.monotonic() > deadline:
                    raise Failure(f"{child.name} is not ready after {self.start_seconds:.0f} s:\n{child.tail()}")
                time.sleep(0.05)

    def __exit__(self, *_):
        with uninterrupted():
            # The gateway first: it is the engines' client, and an engine with requests may ignore TERM.
            for child in reversed(self.children):
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + END_SECONDS
            while time.monotonic() < deadline and any(c.process.poll() is None for c in self.children):
                time.sleep(0.02)
            for child in self.children:
                child.signal(signal.SIGKILL)
                child.process.wait()
