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
import steps
from chats import Chat, Play
from parts import HERE
from stack import CACHE_RAM_MIB, CONTEXT, REPLICAS, SLOTS, Stack
from steps import Failure

ROOT = HERE.parent.parent
POLICIES = ["round-robin", "consistent", "bounded", "llm-aware"]
# What to look for in the log of llm-aware, the most telling first.
TELLING = ["sticky-long", "home-long", "sticky", "overflow", "fallback-least-loaded", "home"]


def say(text=""):
    print(text, flush=True)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="bench/demo/demo.py"
    )
    add = parser.add_argument
    add("--serve", action="store_true", help="start the stack with llm-aware, say what to try, run until Ctrl-C")
    add("--quick", action="store_true", help="one round of fewer, shorter chats: to see that it works, not how well")
    add("--seed", type=int, default=1, metavar="N", help="of the chats (default: 1)")
    add("--policies", default=",".join(POLICIES), metavar="A,B", help="in the order to show (default: %(default)s)")
    add("--rounds", type=int, metavar="N", help="how often each policy plays (default: 2; with --quick 1)")
    add("--out", type=Path, default=ROOT / "target" / "demo", metavar="DIR", help="default: target/demo")
    add("--keep-logs", action="store_true", help="keep logs and configurations, in DIR/logs")
    add("--llm-ring", metavar="PATH", help="the picker (default: LLM_RING, else a release build of this checkout)")
    a = parser.parse_args()
    a.policies = [p.strip() for p in a.policies.split(",") if p.strip()]
    a.rounds = (1 if a.quick else 2) if a.rounds is None else a.rounds
    a.llm_ring = a.llm_ring or os.environ.get("LLM_RING")
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
            raise Failure(
                "cargo is not on the PATH; install Rust (https://rustup.rs), or name a picker with --llm-ring"
            )
        command = ["cargo", "build", "--release", "--bin", "llm-ring"]
        say(f"building the picker (minutes, the first time): {shlex.join(command)}")
        if steps.run(command, cwd=ROOT):
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
        ask = "from importlib.metadata import version; print('xllamacpp', version('xllamacpp'))"
        engine = version([found["LLAMA_PYTHON"], "-c", ask])
    return {
        "llm-ring": version([str(picker), "--version"]),
        "envoy": (version([found["ENVOY"], "--version"]) or "").rpartition("version: ")[2] or None,
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
    count, turns = (9, (2, 3)) if a.quick else (12, (6, 8))
    return [Chat(f"{a.seed}.{round_number}", number, turns) for number in range(count)]


def telling_decision(log):
    """The record of the most telling decision in a picker's log, of those the one on most tokens; or None."""
    records = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line).get("decision")
        except (ValueError, AttributeError):
            continue
        if record and record.get("reason") in TELLING:
            records.append(record)
    return min(records, key=lambda r: (TELLING.index(r["reason"]), -r.get("prompt_tokens", 0)), default=None)


def explained(picker, record, folder):
    path = folder / "decision.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    done = subprocess.run([str(picker), "explain", str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise Failure(f"llm-ring explain {path} ended with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.rstrip()


def play_one(stack, chats, show):
    """Plays the chats through a fresh stack; gives back the turns and the seconds they took."""
    with stack:
        play, began = Play("127.0.0.1", stack.http_port, chats), time.monotonic()

        def watch():
            stack.check()
            show(len(play.turns))

        return play.run(watch), time.monotonic() - began


def play_all(a, found, picker):
    """Every policy in every round, every second round in reverse order, so that none is always first.

    Each run has a stack of its own: caches are empty, and nothing of one policy is left to the next.
    """
    plan = [(r, p) for r in range(a.rounds) for p in (a.policies if r % 2 == 0 else a.policies[::-1])]
    chats = [chats_of(a, r) for r in range(a.rounds)]
    expected = [sum(len(chat.questions) for chat in round_chats) for round_chats in chats]
    progress = Progress(len(plan), sum(expected[r] for r, _ in plan))
    rounds, turns, decision = {p: [] for p in a.policies}, {p: [] for p in a.policies}, None
    for position, (r, policy) in enumerate(plan, 1):
        label = f"run {position} of {len(plan)}: {policy}"
        progress.show(label, 0)
        stack = Stack(found, picker, policy, a.out / "logs" / f"{position}-{policy}")
        seen, seconds = play_one(stack, chats[r], lambda done, label=label: progress.show(label, done))
        numbers = report.measure(seen, stack.engines)
        rounds[policy].append({"round": r + 1, "position": position, "seconds": round(seconds, 1), **numbers})
        turns[policy].append(seen)
        hit = report.percent(numbers["followup_hit_rate"])
        line = f"{label}, {numbers['requests']} requests, {numbers['errors']} errors, hit rate {hit}, {seconds:.0f} s"
        progress.end(line, expected[r])
        for turn in [t for t in seen if t.error][:2]:
            say(f"  {turn.chat} turn {turn.number + 1}: {turn.error}")
        if policy == "llm-aware":
            decision = telling_decision(stack.log("llm-ring")) or decision
    return [report.pool(p, rounds[p], turns[p], stack.engines) for p in a.policies], decision


def compare(a, found, picker):
    began = time.monotonic()
    chats = len(chats_of(a, 0))
    minutes = max(1.0, len(a.policies) * a.rounds * (7 if a.quick else Progress.FIRST_GUESS) / 60)
    say(
        f"{chats} chats at a time over {REPLICAS} engines of {SLOTS} slots; "
        f"{len(a.policies)} policies, {a.rounds} round(s), seed {a.seed}: about {minutes:.0f} min"
    )
    pooled, decision = play_all(a, found, picker)
    say(f"\n{report.table(pooled)}\n\n{report.LEGEND}")
    if a.quick:
        say("\nToo few requests, by --quick, for the times to mean much.")
    if decision:
        text = explained(picker, decision, a.out)
        say(f"\nOne decision of llm-aware, by `llm-ring explain {shown(a.out / 'decision.json')}`:\n")
        say("\n".join("  " + line for line in text.splitlines()))
        decision = {"record": decision, "text": text}
    machine = report.machine()
    whole = {
        "seed": a.seed,
        "quick": a.quick,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine,
        "versions": versions(found, picker),
        "engines": {"count": REPLICAS, "slots": SLOTS, "context": CONTEXT, "cache_ram_mib": CACHE_RAM_MIB},
        "chats": chats,
        "policies": pooled,
        "decision": decision,
    }
    subtitle = (
        f"{REPLICAS} llama.cpp engines of {SLOTS} slots with a tiny model, {chats} chats at a time, "
        f"{pooled[0]['requests']} requests a policy, {machine['cpus']} CPUs, seed {a.seed}"
    )
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
        here = "http://127.0.0.1"
        say(f"""
Running: {len(stack.engines)} engines, Envoy, llm-ring (policy llm-aware). Ctrl-C ends them.

A chat, and where it went (x-routed-to) and why (x-route-reason):

  curl -si {here}:{stack.http_port}/v1/chat/completions -H 'content-type: application/json' \\
    -H 'x-conversation-id: my-chat' -d '{body}'

Watch it:   {shown(picker)} watch --address {here}:{stack.health_port}
Metrics:    {here}:{stack.metrics_port}/metrics
Decisions:  tail -f {shown(stack.log("llm-ring"))}
Settings:   {shown(stack.config)}
""")
        while True:
            stack.check()
            time.sleep(0.5)


def main():
    a = arguments()
    steps.interruptible()
    a.out = a.out.resolve()
    logs = a.out / "logs"
    keep = True  # what went wrong is in them
    try:
        a.out.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(logs, ignore_errors=True)
        picker = Path(a.llm_ring).resolve() if a.llm_ring else built_picker()
        if not os.access(picker, os.X_OK):
            raise Failure(f"{picker} is not a program")
        found = parts.find()
        (serve if a.serve else compare)(a, found, picker)
        keep = a.keep_logs
    except Failure as failure:
        sys.exit(f"\ndemo: {failure}" + (f"\nall logs: {shown(logs)}" if logs.exists() else ""))
    except KeyboardInterrupt:
        keep = a.keep_logs
        say("\nstopped; nothing is left running")
        sys.exit(0 if a.serve else 130)
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None
        sys.exit(1)
    finally:
        if not keep:
            shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    main()
