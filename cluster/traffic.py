#!/usr/bin/env python3
"""Plays the demo's chats against a gateway that runs, with something happening half way through each chat.

Chats, numbers and table are the demo's (bench/demo). Each chat stops in the middle, `--half-way` is run,
and the same chats go on: so what the second half finds in caches is what the change has left of them.
"""

from __future__ import annotations

import argparse
import http.client
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench" / "demo"))

import report  # noqa: E402
from chats import SYSTEM, TIMEOUT_SECONDS, Chat, Turn, ask  # noqa: E402

CHATS, TURNS = 12, (8, 10)


class Talk:
    """A chat, as far as it has got."""

    def __init__(self, chat, host, port):
        self.chat, self.host, self.port = chat, host, port
        self.messages, self.number = [{"role": "system", "content": SYSTEM}], 0

    def go_on(self, until, turns):
        for number in range(self.number, until):
            turn = Turn(self.chat.id, number)
            self.messages.append({"role": "user", "content": self.chat.questions[number]})
            connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_SECONDS)
            try:
                answer = ask(connection, self.chat, self.messages, turn)
                self.messages.append({"role": "assistant", "content": answer})
            except Exception as problem:  # of whatever kind, it is one failed turn
                turn.error = f"{type(problem).__name__}: {problem}"
                self.messages.pop()
            finally:
                connection.close()
            turns.append(turn)
            time.sleep(self.chat.thinks[number])
        self.number = until


def play(talks, share):
    """All chats at once, each up to this share of its questions; gives back the turns."""
    turns = []
    threads = []
    for talk in talks:
        until = int(len(talk.chat.questions) * share)
        threads.append(threading.Thread(target=talk.go_on, args=(until, turns), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return turns


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--half-way", metavar="COMMAND", help="for a shell; such as one that adds an engine")
    a = parser.parse_args()
    talks = [Talk(Chat(a.seed, number, TURNS), a.host, a.port) for number in range(CHATS)]
    print(f"{CHATS} chats, the first half", flush=True)
    before = play(talks, 0.5)
    if a.half_way:
        print(f"half way: {a.half_way}", flush=True)
        subprocess.run(a.half_way, shell=True, check=True)
    print("the second half", flush=True)
    after = play(talks, 1)
    engines = sorted({turn.endpoint for turn in before + after if turn.endpoint})
    halves = [report.pool(name, [report.measure(turns, engines)], [turns], engines) for name, turns in
              (("before", before), ("after", after))]  # fmt: skip
    # A chat that is elsewhere after the change than before it counts as moved in neither half.
    last = {turn.chat: turn.endpoint for turn in sorted(before, key=lambda t: t.number) if turn.endpoint}
    first = {turn.chat: turn.endpoint for turn in sorted(after, key=lambda t: -t.number) if turn.endpoint}
    moved = sum(last.get(chat) not in (None, endpoint) for chat, endpoint in first.items())
    print("\n" + report.table(halves).replace("policy", "half  ", 1) + f"\n\n{report.LEGEND}")
    print(f"\n{moved} of {len(first)} chats went on at another engine than before.")
    for half in halves:
        print(f"requests {half['name']}: {half['requests_by_endpoint']}; picks: {half['reasons']}")
    errors = [turn for turn in before + after if turn.error]
    for turn in errors[:5]:
        print(f"{turn.chat} turn {turn.number + 1}: {turn.error}")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
