#!/usr/bin/env python3
"""Plays the same chats under each policy, against real engines, and shows what the policy made of it.

Three llama.cpp servers with a tiny model and little cache, Envoy in front of them, and llm-ring as
Envoy's endpoint picker. What is missing is set up first (see parts.py). Needs Python 3 and Rust.

environment: ENVOY, LLAMA_SERVER, MODEL, LLM_RING name a program or file of your own to use.
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import parts
import report
from chats import Chat, Play
from parts import HERE, Failure
from stack import CACHE_RAM_MIB, CONTEXT, REPLICAS, SLOTS, Stack

ROOT = HERE.parent.parent
POLICIES = ["round-robin", "consistent", "bounded", "llm-aware"]
# What to look for in the log of llm-aware, the most telling first.
TELLING = ["sticky-long", "sticky", "home-long", "overflow-long", "overflow", "home"]


def say(text=""):
    print(text, flush=True)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="bench/demo/demo.py"
    )
    parser.add_argument("--serve", action="store_true", help="start the stack with llm-aware, print what to try, leave it running until Ctrl-C")
    parser.add_argument("--quick", action="store_true", help="one round of fewer and shorter chats: does it work at all? (its numbers mean little)")
    parser.add_argument("--seed", type=int, default=1, help="of the chats (default: 1)")
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="A,B", help="which, in the order to show (default: %(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often each policy plays; every second round in reverse order (default: 2, or 1 with --quick)")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "demo", metavar="DIR", help="where to write report.json and report.svg (default: target/demo)")
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs and configurations of every run in DIR/logs")
    parser.add_argument("--llm-ring", default=os.environ.get("LLM_RING"), metavar="PATH", help="the picker to use (default: LLM_RING, or a release build of this checkout)")
    a = parser.parse_args()
    a.policies = [p.strip() for p in a.policies.split(",") if p.strip()]
    a.rounds = a.rounds or (1 if a.quick else 2)
    if not a.policies or a.rounds < 1 or len(set(a.policies)) < len(a.policies):
        parser.error("--policies takes different names, --rounds a number from 1")
    return a


def built_picker():
    """target/release/llm-ring, built when it is missing or older than its source."""
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    binary = target / "release" / "llm-ring"
    sources = [ROOT / name for name in ("Cargo.toml", "Cargo.lock", "build.rs")]
    for folder in ("src", "proto"):
        sources += (ROOT / folder).rglob("*")
    newest = max(s.stat().st_mtime for s in sources if s.is_file())
    if not binary.exists() or binary.stat().st_mtime < newest:
        if not shutil.which("cargo"):
            raise Failure("cargo is not on the PATH; install Rust (https://rustup.rs), or name a built picker with --llm-ring")
        command = ["cargo", "build", "--release", "--bin", "llm-ring"]
        say(f"building the picker (minutes, the first time): {shlex.join(command)}")
        if parts.run(command, cwd=ROOT):
            raise Failure("the build failed, see above")
    return binary


def version(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0].strip() if lines else None


def versions(found, picker):
    if "LLAMA_SERVER" in found:
        engine = version([found["LLAMA_SERVER"], "--version"])
    else:
        engine = version([found["LLAMA_PYTHON"], "-c", "from importlib.metadata import version; print('xllamacpp', version('xllamacpp'))"])
    return {
        "llm-ring": version([str(picker), "--version"]),
        "envoy": version([found["ENVOY"], "--version"]),
        "engine": engine,
        "python": sys.version.split()[0],
    }


class Progress:
    """A bar on a terminal; elsewhere a line for each run. The time left is judged by the runs so far."""

    FIRST_GUESS = 15.0  # seconds a run

    def __init__(self, runs, turns):
        self.runs, self.turns, self.bar = runs, turns, sys.stdout.isatty()
        self.began, self.done = time.monotonic(), 0

    def show(self, run, turns):
        if not self.bar:
            return
        share = (self.done + turns) / (self.turns or 1)
        elapsed = time.monotonic() - self.began
        left = max(0.0, elapsed / share - elapsed if share > 0.1 else self.runs * self.FIRST_GUESS - elapsed)
        filled = int(share * 30)
        line = f"[{'#' * filled}{'.' * (30 - filled)}] {share:4.0%}  {run}, {int(left) // 60}:{int(left) % 60:02d} left"
        print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def end(self, line, turns=0):
        self.done += turns
        print(("\r\033[K" if self.bar else "") + line, flush=True)


def chats_of(a, round_number):
    count, turns = (9, (2, 3)) if a.quick else (18, (4, 6))
    return [Chat(f"{a.seed}.{round_number}", number, turns) for number in range(count)]


def telling_decision(log):
    """The record of the most telling decision in a picker's log, or None."""
    best, best_rank = None, len(TELLING)
    for line in log.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        record = event.get("decision") if isinstance(event, dict) else None
        if isinstance(record, dict) and record.get("reason") in TELLING[:best_rank]:
            best, best_rank = record, TELLING.index(record["reason"])
    return best


def explained(picker, record, folder):
    path = folder / "decision.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    done = subprocess.run([str(picker), "explain", str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Failure(f"llm-ring explain {path} ended with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.rstrip()


def play_all(a, found, picker):
    """Every policy in every round; gives back the rounds and turns of each, and a decision."""
    plan = [(r, p) for r in range(a.rounds) for p in (a.policies if r % 2 == 0 else a.policies[::-1])]
    chats = [chats_of(a, r) for r in range(a.rounds)]
    counts = [sum(len(c.questions) for c in of_round) for of_round in chats]
    progress = Progress(len(plan), sum(counts[r] for r, _ in plan))
    rounds, turns, decision, endpoints = {p: [] for p in a.policies}, {p: [] for p in a.policies}, None, []
    for position, (r, policy) in enumerate(plan, 1):
        label = f"run {position} of {len(plan)}: {policy}"
        progress.show(label, 0)
        stack = Stack(found, picker, policy, a.out / "logs" / f"{position}-{policy}")
        with stack:
            play, began = Play("127.0.0.1", stack.http_port, chats[r]), time.monotonic()

            def watch():
                stack.check()
                progress.show(label, len(play.turns))

            seen = play.run(watch)
            seconds = time.monotonic() - began
        endpoints = list(stack.engines)
        numbers = {"round": r + 1, "position": position, "seconds": round(seconds, 1), **report.measure(seen, endpoints)}
        rounds[policy].append(numbers)
        turns[policy].append(seen)
        hit = report.show(numbers["followup_hit_rate"] and numbers["followup_hit_rate"] * 100, "{:.0f}", " %")
        progress.end(
            f"{label}, {numbers['requests']} requests, {numbers['errors']} errors, hit rate {hit}, {seconds:.0f} s", counts[r]
        )
        for turn in [t for t in seen if t.error][:2]:
            say(f"  {turn.chat} turn {turn.number + 1}: {turn.error}")
        if policy == "llm-aware":
            decision = telling_decision(stack.log("llm-ring")) or decision
    pooled = [report.pool(p, rounds[p], turns[p], endpoints) for p in a.policies]
    return pooled, decision


def compare(a, found, picker):
    began = time.monotonic()
    first = chats_of(a, 0)
    say(f"{len(first)} chats at a time over {REPLICAS} engines of {SLOTS} slots; {len(a.policies)} policies, {a.rounds} round(s), seed {a.seed}")
    pooled, decision = play_all(a, found, picker)
    whole = {
        "seed": a.seed,
        "quick": a.quick,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "machine": report.machine(),
        "versions": versions(found, picker),
        "setup": {"engines": REPLICAS, "slots": SLOTS, "context": CONTEXT, "cache_ram_mib": CACHE_RAM_MIB, "chats": len(first), "rounds": a.rounds},
        "policies": pooled,
        "decision": None,
    }
    say("\n" + report.table(pooled) + "\n\n" + report.LEGEND)
    if decision:
        text = explained(picker, decision, a.out)
        whole["decision"] = {"record": decision, "text": text}
        say(f"\nOne decision of llm-aware, as `llm-ring explain {shown(a.out / 'decision.json')}` tells it:\n")
        say("\n".join("  " + line for line in text.splitlines()))
    subtitle = f"{REPLICAS} llama.cpp engines of {SLOTS} slots with a tiny model, {len(first)} chats at a time, {pooled[0]['requests']} requests a policy, {whole['machine']['cpus']} CPUs, seed {a.seed}"
    (a.out / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    (a.out / "report.svg").write_text(report.chart(pooled, subtitle))
    say(f"\nwritten: {shown(a.out / 'report.json')}, {shown(a.out / 'report.svg')}")


def shown(path):
    """A path as short as it can be said from here."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("../..") else short


def serve(a, found, picker):
    with Stack(found, picker, "llm-aware", a.out / "logs" / "serve") as stack:
        body = '{"model": "tiny", "max_tokens": 24, "messages": [{"role": "user", "content": "Who kept the bridge?"}]}'
        metrics = f"http://127.0.0.1:{stack.metrics_port}"
        say(f"""
Running: {len(stack.engines)} engines, Envoy, llm-ring (policy llm-aware). Ctrl-C ends them.

A chat, and where it went (x-routed-to) and why (x-route-reason):

  curl -si http://127.0.0.1:{stack.http_port}/v1/chat/completions -H 'content-type: application/json' \\
    -H 'x-conversation-id: my-chat' -d '{body}'

Metrics:    {metrics}/metrics
Watch it:   {shown(picker)} watch {metrics}
Decisions:  tail -f {shown(stack.log('llm-ring'))}
Settings:   {shown(stack.config)}
""")
        while True:
            stack.check()
            time.sleep(0.5)


def main():
    a = arguments()
    parts.interruptible()
    a.out = a.out.resolve()
    logs = a.out / "logs"
    keep = a.keep_logs
    try:
        a.out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(logs, ignore_errors=True)
        picker = Path(a.llm_ring).resolve() if a.llm_ring else built_picker()
        if not os.access(picker, os.X_OK):
            raise Failure(f"{picker} is not a program")
        found = parts.find()
        (serve if a.serve else compare)(a, found, picker)
    except Failure as failure:
        keep = True
        say()
        sys.exit(f"demo: {failure}\nlogs: {shown(logs)}" if logs.exists() else f"demo: {failure}")
    except KeyboardInterrupt:
        say("\nstopped" + (", nothing is left running" if logs.exists() else ""))
        sys.exit(0 if a.serve else 130)
    finally:
        if not keep:
            shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    main()
