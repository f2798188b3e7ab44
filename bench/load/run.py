#!/usr/bin/env python3
"""Measures what the picker costs behind a real Envoy, next to the floor: an ext_proc service that does nothing.

    $ make bench-load                              all cases, 3 rounds, about 10 minutes
    $ bench/load/run.py --rounds 1 --seconds 5 --case closed-4k --case sse-4k
    $ bench/load/run.py --picker default --picker quiet log.decisions=false --picker one server.threads=1

Each --picker is one more contestant: a name, then settings of the picker's configuration file that differ
from its defaults, and binary=PATH for another build. In every round all start anew, and each case runs on one
after the other, so that what else the machine does hits all of them. The floor is `naked`; ratios are to it.
Medians of all rounds are printed, and every number goes to bench/results/.

All parts share one machine: compare only within one run, and look at the spread of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENGINES = 8
FLOOR = "naked"
IDLE_SECONDS = 8
CASES = {
    "idle": None,
    "closed-4k": "--size 4096 --clients 16",
    "closed-222k": "--size 222000 --clients 16",
    "open-4k": "--size 4096 --rate 100",
    "sse-4k": "--size 4096 --rate 200 --stream",
    "open-222k": "--size 222000 --rate 30",
    "closed-5m": "--size 5000000 --clients 4 --conversations 20",
}


class Failure(Exception):
    """Something the user has to know; shown without a traceback."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def output_of(*command):
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def find_envoy():
    if os.environ.get("ENVOY"):
        return os.environ["ENVOY"]
    parts = output_of(sys.executable, str(ROOT / "bench/demo/parts.py"))
    return next(shlex.split(line)[0][6:] for line in parts.splitlines() if line.startswith("ENVOY="))


def build():
    command = "cargo build --release --bin llm-ring --example load --example backend --example naked"
    say(f"$ {command}")
    if subprocess.run(command.split(), cwd=ROOT).returncode:
        raise Failure("the build has failed")
    return ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release"


class Processes:
    """Everything that was started; all of it ends with the block."""

    def __init__(self, folder):
        self.folder, self.running = folder, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()

    def start(self, name, command, **options):
        log = (self.folder / f"{name}.log").open("ab")
        # In a session of its own, so that Ctrl-C reaches only us and we end them in order.
        options = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True, **options}
        process = subprocess.Popen([str(part) for part in command], **options)
        process.log = self.folder / f"{name}.log"
        self.running.append(process)
        return process

    @staticmethod
    def await_port(process, port):
        for _ in range(200):
            if process.poll() is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.05)
        raise Failure(f"{process.args[0]} does not serve:\n{process.log.read_text()[-2000:]}")


def setting(config, path, value):
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    try:
        config[last] = json.loads(value)
    except ValueError:
        config[last] = value


class Contestant:
    def __init__(self, name, settings):
        self.name, self.settings = name, settings

    def command(self, folder, binaries, engines, port, threads):
        """What to start; a configuration file in JSON is one in YAML."""
        if self.name == FLOOR:
            return [binaries / "examples/naked", port, threads, *engines]
        binary = binaries / "llm-ring"
        endpoints = [
            {"name": f"llm-{i}", "address": address.split(":")[0], "port": int(address.split(":")[1])}
            for i, address in enumerate(engines)
        ]
        (folder / "endpoints.yaml").write_text(json.dumps({"endpoints": endpoints}))
        config = {
            "server": {"address": "127.0.0.1", "grpc_port": port, "health_port": 0, "metrics_port": 0},
            "tls": {"mode": "off"},
            "endpoints": {"file": str(folder / "endpoints.yaml")},
        }
        for path, _, value in (text.partition("=") for text in self.settings):
            if path == "binary":
                binary = value
            else:
                setting(config, path, value)
        (folder / f"{self.name}.yaml").write_text(json.dumps(config, indent=1))
        return [binary, "serve", "--config", folder / f"{self.name}.yaml"]


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid):
    line = next(s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if s.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def idle(process):
    before = cpu_seconds(process.pid)
    time.sleep(IDLE_SECONDS)
    cores = (cpu_seconds(process.pid) - before) / IDLE_SECONDS
    return {"processes": {"picker": {"cores": cores, "rss_mib": rss_mib(process.pid)}}}


def measure(binaries, case, arguments, port, picker, envoy):
    if case == "idle":
        return idle(picker)
    result = subprocess.run(
        [
            *(binaries / "examples/load", f"127.0.0.1:{port}", *CASES[case].split()),
            *("--seconds", str(arguments.seconds), "--seed", str(arguments.seed)),
            *("--pid", f"picker={picker.pid}", "--pid", f"envoy={envoy.pid}"),
        ],
        check=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    return json.loads(result.stdout)


def one_round(number, arguments, contestants, binaries, envoy_binary, folder):
    """Runs all cases once on all contestants; returns {case: {contestant: numbers}}."""
    results = {}
    with Processes(folder) as processes:
        backend = processes.start("backend", [binaries / "examples/backend", ENGINES], stdout=subprocess.PIPE)
        engines = [line.decode().strip() for line in iter(backend.stdout.readline, b"ready\n")]
        running = {}
        for contestant in contestants:
            picker_port, http_port = free_port(), free_port()
            command = contestant.command(folder, binaries, engines, picker_port, arguments.naked_threads)
            picker = processes.start(contestant.name, command)
            processes.await_port(picker, picker_port)
            config = folder / f"envoy-{contestant.name}.yaml"
            ports = {"http_port": http_port, "picker_port": picker_port}
            config.write_text(Template((HERE / "envoy.yaml").read_text()).substitute(ports))
            flags = ["--concurrency", "1", "-l", "warning", "--disable-hot-restart"]
            envoy = processes.start(f"envoy-{contestant.name}", [envoy_binary, "-c", config, *flags])
            processes.await_port(envoy, http_port)
            running[contestant.name] = (http_port, picker, envoy)
        for case in arguments.case or CASES:
            results[case] = {}
            # Whoever went first goes last in the next round.
            for name in list(running) if number % 2 else reversed(running):
                load = os.getloadavg()[0]
                result = results[case][name] = measure(binaries, case, arguments, *running[name])
                result["load_average_before"] = load
                fine = not result.get("wrong_lengths") and set(result.get("codes", {"200": 0})) == {"200"}
                say(f"  round {number}  {case:12} {name:12} {brief(result)}{'' if fine else '  ERRORS'}")
    return results


def brief(result):
    picker = result["processes"]["picker"]
    if "p50" not in result:
        return f"{picker['cores']:.4f} cores  {picker['rss_mib']:.1f} MiB"
    return (
        f"{result['per_second']:7.0f}/s  p50 {result['p50']:.2f}  p99 {result['p99']:.2f} ms  "
        f"CPU {picker['cpu_ms_per_request']:.3f} ms  {picker['rss_mib']:.1f} MiB"
    )


def bad(result):
    """Requests that did not get their answer, or whose body came changed."""
    return sum(n for code, n in result.get("codes", {}).items() if code != "200") + result.get("wrong_lengths", 0)


def median_of(rounds, case, name, *path):
    values = []
    for results in rounds:
        value = results[case][name]
        for key in path:
            value = value.get(key, {}) if isinstance(value, dict) else {}
        if value != {}:
            values.append(value)
    return statistics.median(values) if values else None


def summary(rounds, contestants):
    """One row a case and contestant; ratios are the medians of each round's own."""
    rows = []
    for case in rounds[0]:
        for contestant in contestants:
            name, cpu, rss = contestant.name, ("processes", "picker", "cpu_ms_per_request"), ("processes", "picker", "rss_mib")
            row = {
                "case": case,
                "who": name,
                "per_second": median_of(rounds, case, name, "per_second"),
                **{q: median_of(rounds, case, name, q) for q in ("p50", "p90", "p95", "p99")},
                "cpu_ms": median_of(rounds, case, name, *cpu),
                "cores": median_of(rounds, case, name, "processes", "picker", "cores"),
                "envoy_cpu_ms": median_of(rounds, case, name, "processes", "envoy", "cpu_ms_per_request"),
                "rss_mib": median_of(rounds, case, name, *rss),
                "endpoints": max(len(r[case][name].get("spread", {})) for r in rounds),
                "errors": sum(bad(r[case][name]) for r in rounds),
            }
            for key, path in (("cpu_ratio", cpu), ("p50_ratio", ("p50",)), ("p99_ratio", ("p99",))):
                pairs = [
                    (median_of([r], case, name, *path), median_of([r], case, FLOOR, *path))
                    for r in rounds
                    if FLOOR in r[case]
                ]
                ratios = [ours / floor for ours, floor in pairs if ours is not None and floor]
                row[key] = statistics.median(ratios) if ratios and name != FLOOR else None
            rows.append(row)
    return rows


def table(rows):
    columns = [
        ("case", "case", "{}"),
        ("", "who", "{}"),
        ("req/s", "per_second", "{:.0f}"),
        ("p50 ms", "p50", "{:.2f}"),
        ("p95", "p95", "{:.2f}"),
        ("p99", "p99", "{:.2f}"),
        ("CPU ms/req", "cpu_ms", "{:.3f}"),
        ("cores", "cores", "{:.3f}"),
        ("RSS MiB", "rss_mib", "{:.1f}"),
        ("Envoy CPU", "envoy_cpu_ms", "{:.3f}"),
        ("CPU ×floor", "cpu_ratio", "{:.2f}"),
        ("p50 ×floor", "p50_ratio", "{:.2f}"),
        ("p99 ×floor", "p99_ratio", "{:.2f}"),
        ("endpoints", "endpoints", "{}"),
        ("errors", "errors", "{}"),
    ]
    lines = [[title for title, _, _ in columns]]
    lines.append(["---"] * len(columns))
    for row in rows:
        lines.append(["" if row[key] is None else form.format(row[key]) for _, key, form in columns])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine():
    model = next((s.split(":")[1].strip() for s in open("/proc/cpuinfo") if s.startswith("model name")), "?")
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}"


def commit():
    dirty = " with changes" if output_of("git", "status", "--porcelain", "--", "src", "Cargo.toml", "Cargo.lock") else ""
    return output_of("git", "rev-parse", "--short=12", "HEAD") + dirty


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of each case [10]")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    parser.add_argument("--picker", nargs="+", action="append", metavar=("NAME", "KEY=VALUE"), help="see above")
    parser.add_argument("--naked-threads", type=int, default=0, help="as server.threads; 0 is one a core [0]")
    parser.add_argument("--no-floor", action="store_true", help="leave `naked` out")
    parser.add_argument("--no-build", action="store_true", help="what is built is current")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="[bench/results/DATE-load.json]")
    return parser.parse_args()


def main():
    arguments = parse()
    contestants = [Contestant(name, settings) for name, *settings in arguments.picker or [["picker"]]]
    if not arguments.no_floor:
        contestants.append(Contestant(FLOOR, []))
    today = datetime.date.today().isoformat()
    out = arguments.out or ROOT / "bench/results" / f"{today}-load.json"
    envoy = find_envoy()
    binaries = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release" if arguments.no_build else build()
    with tempfile.TemporaryDirectory(prefix="llm-ring-load-") as folder:
        rounds = []
        for number in range(1, arguments.rounds + 1):
            rounds.append(one_round(number, arguments, contestants, binaries, envoy, Path(folder)))
    rows = summary(rounds, contestants)
    document = {
        "date": today,
        "machine": machine(),
        "command": shlex.join(["bench/load/run.py", *sys.argv[1:]]),
        "commit": commit(),
        "envoy": output_of(envoy, "--version").split()[-1],
        "pickers": {c.name: c.settings for c in contestants},
        "seconds": arguments.seconds,
        "medians": rows,
        "rounds": rounds,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))
    say(f"all numbers: {out}")
    if any(row["errors"] for row in rows):
        raise Failure("some requests have failed: see codes and wrong_lengths")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        main()
    except Failure as failure:
        sys.exit(f"bench-load: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
