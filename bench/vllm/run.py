#!/usr/bin/env python3
"""Holds what the picker predicts of two real vLLM engines' caches against what they deliver, request by request.

Conversations that share documents go through Envoy and llm-ring to two vLLM engines on the CPU. In the middle an engine
is killed and started again, and so is the picker. For each request the tokens that its decision took to be cached on
the chosen engine stand beside those that the engine says it had.

Without vLLM nothing is run, and the last line says so; --install puts it into the cache (6 GB).

environment: VLLM_PYTHON, an interpreter with vLLM; ENVOY, LLM_RING and others as in bench/demo.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))

import demo
import engines
import parts
import report
import steps
from chats import SYSTEM, TIMEOUT_SECONDS, Turn, ask, prose
from engines import BLOCK_TOKENS, VllmStack
from steps import Failure

CONVERSATIONS, DOCUMENTS, DOCUMENT_WORDS, QUESTION_WORDS = 8, 3, (500, 700), (20, 50)
CLIENTS = 2
# Phase by phase: how often each conversation has its turn.
TOGETHER, KILLED, STARTING, BACK, RESTARTED = "both engines", "one killed", "it starts", "it is back", "picker anew"
ROUNDS = {TOGETHER: 3, KILLED: 1, STARTING: 1, BACK: 2, RESTARTED: 2}
MAY_FAIL = {KILLED, STARTING}
# A phase in which more of the prompts' tokens than this were predicted wrongly is a failure; what it allows for are
# requests that overtake the events of those before them.
WRONG_SHARE = 0.05


def say(text=""):
    print(text, flush=True)


SOURCES = ("tokenizers", "metrics", "events")


def knowledge(stack, without):
    """The settings by which the picker knows prompts' tokens, engines' load and engines' caches."""
    settings = {
        "tokenizers": {"models": {"tiny": {"folder": str(stack.model), "dialect": "vllm"}}},
        "metrics": {"enabled": "metrics" not in without},
        "events": {"enabled": True, "port": stack.events_port, "replay_port": stack.replay_port},
    }
    return {name: value for name, value in settings.items() if name == "metrics" or name not in without}


class Conversation:
    """One person's, about a document that others ask about too."""

    def __init__(self, seed, number):
        self.rng = random.Random(f"{seed}/{number}")
        document = random.Random(f"{seed}/document/{number % DOCUMENTS}")
        self.id = f"talk-{seed}-{number}"
        self.record = prose(document, document.randint(*DOCUMENT_WORDS))
        self.messages = [{"role": "system", "content": SYSTEM}]
        self.turns = 0

    def turn(self, port, phase):
        question = prose(self.rng, self.rng.randint(*QUESTION_WORDS))
        if not self.turns:
            question = f"This is the record:\n\n{self.record}\n\n{question}"
        turn = Turn(self.id, self.turns)
        turn.phase, turn.began = phase, time.time()
        self.turns += 1
        self.messages.append({"role": "user", "content": question})
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
        try:
            self.messages.append({"role": "assistant", "content": ask(connection, self, self.messages, turn)})
        except Exception as problem:  # of whatever kind, it is one failed turn
            turn.error = f"{type(problem).__name__}: {problem}"
            self.messages.pop()
            if not any(message["role"] == "user" for message in self.messages):
                self.turns, turn.number = 0, 0  # the document has not been told yet
        finally:
            connection.close()
        return turn


def play(stack, conversations, phase, rounds, watch=lambda done: None):
    """Every conversation has its turn, round by round, two at a time; `watch` is called after each."""
    turns = []
    for _ in range(rounds):
        with ThreadPoolExecutor(CLIENTS) as pool:
            try:
                asked = [pool.submit(talk.turn, stack.http_port, phase) for talk in conversations]
                for one in as_completed(asked):
                    turns.append(one.result())
                    watch(len(turns))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return turns


def busiest(turns):
    count = {}
    for turn in turns:
        if turn.endpoint:
            count[turn.endpoint] = count.get(turn.endpoint, 0) + 1
    if not count:
        raise Failure(f"no request was answered: {turns[0].error}")
    return max(sorted(count), key=count.get)


def story(stack, conversations):
    """All phases; gives back their turns and what else was measured."""
    turns, facts = [], {}

    def phase(name, watch=lambda done: None):
        began = time.monotonic()
        turns.extend(play(stack, conversations, name, ROUNDS[name], watch))
        failed = sum(1 for turn in turns if turn.phase == name and turn.error)
        say(f"  {name}: {ROUNDS[name] * len(conversations)} requests, {failed} failed, "
            f"{time.monotonic() - began:.0f} s")  # fmt: skip

    phase(TOGETHER)
    killed = busiest(turns)
    at = len(conversations) // 2

    def kill(done):
        if done == at:
            stack.end(killed, signal.SIGKILL)
            say(f"  {killed} killed")

    phase(KILLED, kill)
    stack.again(killed)
    phase(STARTING)
    facts["killed"] = killed
    facts["restart_seconds"] = round(stack.await_ready(killed), 1)
    say(f"  {killed} is ready again")
    phase(BACK)
    began = time.monotonic()
    stack.end("llm-ring")
    stack.again("llm-ring")
    stack.await_ready("llm-ring")
    facts["picker_seconds"] = round(time.monotonic() - began, 2)
    say(f"  the picker ended and started again in {facts['picker_seconds']} s")
    phase(RESTARTED)
    return turns, facts


def decisions(logs):
    """The records in a picker's logs, by conversation, in the order in which its requests ended."""
    found = {}
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line).get("decision")
            except (ValueError, AttributeError):
                continue
            if record and record.get("conversation"):
                found.setdefault(record["conversation"]["id"], []).append(record)
    return found


def joined(turns, records):
    """A row for each turn with its decision. A conversation's requests follow each other, and so do its records."""
    rows, taken = [], {}
    for turn in turns:
        place = taken.get(turn.chat, 0)
        taken[turn.chat] = place + 1
        own = records.get(turn.chat, [])
        record = own[place] if place < len(own) else {}
        outcome = record.get("outcome") or {}
        rows.append({
            "phase": turn.phase, "conversation": turn.chat, "turn": turn.number, "error": turn.error,
            "engine": record.get("target") or None, "reason": record.get("reason") or record.get("refusal"),
            "told_prompt": record.get("prompt_tokens"), "prompt": outcome.get("prompt_tokens"),
            "predicted": record.get("cached_tokens", 0) if record else None,
            "delivered": outcome.get("cached_tokens"), "seen": None if turn.error else turn.cached_tokens,
            "ttft_ms": None if turn.error else round(turn.ttft_ms, 1),
        })  # fmt: skip
    for talk in sorted({*taken, *records}):
        asked, written = taken.get(talk, 0), len(records.get(talk, []))
        if asked != written:
            raise Failure(f"{talk} had {asked} requests, and the picker has written of {written}")
    return rows


def measured(row):
    return row["predicted"] is not None and row["delivered"] is not None and row["prompt"] is not None


def totals(rows):
    """The numbers of the rows of one phase, or of all."""
    good = [row for row in rows if measured(row)]
    wrong = [row["predicted"] - row["delivered"] for row in good]
    prompt = sum(row["prompt"] for row in good)
    return {
        "requests": len(rows),
        "failed": sum(1 for row in rows if row["error"]),
        "prompt": prompt,
        "predicted": sum(row["predicted"] for row in good),
        "delivered": sum(row["delivered"] for row in good),
        "exact": sum(1 for w in wrong if w == 0),
        "within_a_block": sum(1 for w in wrong if abs(w) <= BLOCK_TOKENS),
        "too_many": sum(w for w in wrong if w > 0),
        "too_few": -sum(w for w in wrong if w < 0),
        "wrong_share": round(sum(map(abs, wrong)) / prompt, 4) if prompt else None,
        "same_prompt": sum(1 for row in good if row["told_prompt"] == row["prompt"]),
    }


def complaints(rows, guessed):
    """What must not have happened; where the picker is left to guess, wrong predictions may."""
    found = []
    for phase in ROUNDS:
        own = [row for row in rows if row["phase"] == phase]
        for row in own:
            label = f"{phase}: turn {row['turn']} of {row['conversation']}"
            if row["error"] and phase not in MAY_FAIL:
                found.append(f"{label} failed: {row['error']}")
            if not row["error"] and not measured(row):
                found.append(f"{label} went well, and the picker's log does not have its cached tokens")
            elif not row["error"] and row["seen"] != row["delivered"]:
                found.append(f"{label}: the client saw {row['seen']} cached tokens, the picker {row['delivered']}")
        share = totals(own)["wrong_share"]
        if not guessed and (share is None or share > WRONG_SHARE):
            found.append(f"{phase}: predictions were wrong by {report.percent(share)} of the prompts' tokens")
    return found


def aligned(rows):
    """A table: the first row is its head; numbers stand to the right."""
    text = [["-" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in r] for r in rows]
    widths = [max(map(len, column)) for column in zip(*text)]
    number = [all(c is None or isinstance(c, (int, float)) for c in column) for column in zip(*rows[1:])]
    lines = [
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, number)).rstrip() for row in text
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def tables(rows):
    head = ["phase", "conversation", "turn", "engine", "reason", "prompt", "predicted", "delivered", "off"]
    each = [head]
    for row in rows:
        off = row["predicted"] - row["delivered"] if measured(row) else None
        why = "failed" if row["error"] else row["reason"]
        each.append([row["phase"], row["conversation"], row["turn"], row["engine"] or "none", why, row["prompt"],
                     row["predicted"], row["delivered"], off])  # fmt: skip
    head = ["phase", "requests", "failed", "prompt", "predicted", "delivered", "exact", "in a block", "too many",
            "too few", "wrong", "same length"]  # fmt: skip
    sums = [head]
    for phase in [*ROUNDS, "all"]:
        t = totals([row for row in rows if phase in ("all", row["phase"])])
        sums.append([phase, *(t[k] for k in ("requests", "failed", "prompt", "predicted", "delivered", "exact",
                     "within_a_block", "too_many", "too_few")), report.percent(t["wrong_share"]),
                     t["same_prompt"]])  # fmt: skip
    return aligned(each) + "\n\n" + aligned(sums)


LEGEND = f"""\
predicted    tokens of the prompt that the decision took to be cached on the engine it chose
delivered    tokens that the engine says it had; requests without an answer have none and are not counted
in a block   requests where the two differ by {BLOCK_TOKENS} tokens, a block, or less
wrong        what was predicted too much or too little, of all prompts' tokens
same length  requests whose prompt is as long by the picker's count of tokens as by the engine's"""


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="bench/vllm/run.py"
    )
    add = parser.add_argument
    add("--install", action="store_true", help=f"install vLLM if it is missing ({engines.NOTICE})")
    add("--dry", action="store_true", help="start the picker and Envoy without engines, and end: checks the set-up")
    what = f"what the picker is not to know by, to compare: {', '.join(SOURCES)}"
    add("--without", default="", metavar="A,B", help=what)
    add("--policy", default="llm-aware", metavar="NAME", help="default: %(default)s")
    add("--seed", type=int, default=1, metavar="N", help="of the conversations (default: 1)")
    add("--out", type=Path, default=demo.ROOT / "target" / "vllm", metavar="DIR", help="default: target/vllm")
    add("--llm-ring", metavar="PATH", help="the picker (default: LLM_RING, else a release build of this checkout)")
    a = parser.parse_args()
    a.without = [name for name in a.without.split(",") if name]
    if not set(a.without) <= set(SOURCES):
        parser.error(f"--without takes {', '.join(SOURCES)}")
    a.llm_ring, a.out = a.llm_ring or os.environ.get("LLM_RING"), a.out.resolve()
    return a


def run(a):
    """Gives back the complaints; None if nothing was run."""
    if a.install:
        engines.install()
    python = engines.find()
    if not python and not a.dry:
        return None
    picker = Path(a.llm_ring).resolve() if a.llm_ring else demo.built_picker()
    found = parts.find()
    if "TOKENIZER" not in found:
        raise Failure("MODEL is your own: name the folder of its tokenizer too, as TOKENIZER")
    shutil.rmtree(a.out, ignore_errors=True)
    stack = VllmStack(
        found, python, picker, a.policy, a.out, lambda stack: knowledge(stack, a.without), engines=not a.dry
    )
    conversations = [Conversation(a.seed, number) for number in range(CONVERSATIONS)]
    if a.dry:
        with stack:
            say(f"the picker and Envoy start; vLLM: {engines.version(python) if python else 'not installed'}")
        return []
    began, name = time.monotonic(), engines.version(python)
    say(f"starting two engines, {name} (minutes on a small machine)")
    with stack:
        facts = {"engine": name, "start_seconds": round(time.monotonic() - began, 1)}
        facts["memory_bytes"] = {name: engines.memory(stack.child(name).process.pid) for name in stack.engines}
        told = " and ".join(f"{(size or 0) / 2**30:.1f} GiB" for size in facts["memory_bytes"].values())
        say(f"  ready in {facts['start_seconds']:.0f} s, {told} of memory")
        turns, more = story(stack, conversations)
        stack.check()
    rows = joined(turns, decisions(stack.picker_logs))
    wrong = complaints(rows, bool(a.without))
    whole = {
        "llm-ring": demo.version([str(picker), "--version"]), "machine": report.machine(), "policy": a.policy,
        "without": a.without, "seed": a.seed, "block_tokens": BLOCK_TOKENS, **facts, **more,
        "phases": {phase: totals([row for row in rows if row["phase"] == phase]) for phase in ROUNDS},
        "all": totals(rows), "complaints": wrong, "requests": rows,
    }  # fmt: skip
    (a.out / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    say("\n" + tables(rows) + "\n\n" + LEGEND + f"\n\nwritten: {demo.shown(a.out / 'report.json')}, logs beside it")
    return wrong


def main():
    a = arguments()
    steps.interruptible()
    try:
        wrong = run(a)
    except Failure as failure:
        sys.exit(f"\nvllm: {failure}\nlogs, if any: {demo.shown(a.out)}")
    except KeyboardInterrupt:
        say("\nstopped; nothing is left running")
        sys.exit(130)
    if wrong is None:
        say(f"""
SKIPPED: the run against real vLLM engines was not made, because vLLM is not installed here.
Install it with `python3 bench/vllm/run.py --install` ({engines.NOTICE}),
or name an interpreter that has it in VLLM_PYTHON.

0 passed, 0 failed, 1 skipped""")
        return
    for line in wrong:
        say(f"WRONG: {line}")
    say(f"\n{int(not wrong)} passed, {int(bool(wrong))} failed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
