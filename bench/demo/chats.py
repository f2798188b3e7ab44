"""The chats that the demo plays: who says what and when, and what came back.

A chat is one person's: ask, read the answer as it streams, think, ask again; every turn sends the
whole conversation so far, with the engine's real answers in it. Every third chat opens with a long
document. Words, lengths, think times and arrivals come from the seed and from nothing else, so each
policy is given the same chats.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time

ANSWER_TOKENS = 24
ARRIVALS_SECONDS = 3.0
THINK_MEAN_SECONDS, THINK_MOST_SECONDS = 0.8, 2.5
DOCUMENT_WORDS = (600, 800)  # about 1,700 to 2,300 tokens of the tiny model
QUESTION_WORDS = (20, 50)
TIMEOUT_SECONDS = 60.0

SYSTEM = (
    "You are the assistant of a small town archive. Answer in one short paragraph, name the page you "
    "used, and say so when the records do not tell. Do not guess at names or dates."
)
WORDS = (
    "the a of and to in that was for with on at by from this which have were their would about after before "
    "archive record letter map house river bridge market school church mill road field garden winter summer "
    "council clerk mayor doctor baker farmer teacher sailor merchant widow brother daughter family name year "
    "month morning evening page folder shelf box copy stamp seal ink paper list price grain wool timber stone "
    "water fire flood storm harvest wedding trial debt rent tax fee gift promise journey ship horse cart bell "
    "tower gate wall window door lamp table old new first second last early late small large open lost found "
    "built sold bought moved signed wrote read kept burned paid owed left returned asked answered agreed"
).split()


def prose(rng, words):
    """Sentences of random words, `words` long in all."""
    sentences = []
    while words > 0:
        length = min(words, rng.randint(7, 14))
        sentences.append(" ".join(rng.choice(WORDS) for _ in range(length)).capitalize() + ".")
        words -= length
    return " ".join(sentences)


class Chat:
    def __init__(self, seed, number, turns):
        rng = random.Random(f"{seed}/{number}")
        self.id = f"chat-{seed}-{number:02d}"
        self.begins = rng.uniform(0, ARRIVALS_SECONDS)
        self.questions = []
        self.thinks = []
        for _ in range(rng.randint(*turns)):
            self.questions.append(prose(rng, rng.randint(*QUESTION_WORDS)))
            self.thinks.append(min(rng.expovariate(1 / THINK_MEAN_SECONDS), THINK_MOST_SECONDS))
        if number % 3 == 0:
            document = prose(rng, rng.randint(*DOCUMENT_WORDS))
            self.questions[0] = f"This is the record:\n\n{document}\n\n{self.questions[0]}"


class Turn:
    """One request, and what was seen of it. `error` is None when it went well."""

    def __init__(self, chat, number):
        self.chat, self.number = chat, number
        self.error = self.endpoint = self.reason = None
        self.prompt_tokens = self.cached_tokens = self.answer_tokens = 0
        self.ttft_ms = self.total_ms = 0.0


def ask(connection, chat, messages, turn):
    """Sends one turn and reads its stream into `turn`; gives back the answer."""
    body = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"content-type": "application/json", "x-conversation-id": chat.id}
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
    response = connection.getresponse()
    turn.endpoint = response.getheader("x-routed-to")
    turn.reason = response.getheader("x-route-reason")
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read(200).decode(errors='replace')}")
    answer, usage, done = [], None, False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                # The first chunk has a role and no text: it is sent before the prompt is read.
                turn.ttft_ms = turn.ttft_ms or (time.perf_counter() - began) * 1000
                answer.append(text)
    turn.total_ms = (time.perf_counter() - began) * 1000
    if not (done and usage and answer):
        raise ValueError("the stream ended early")
    turn.prompt_tokens = usage["prompt_tokens"]
    turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    turn.answer_tokens = usage["completion_tokens"]
    return "".join(answer)


class Play:
    """Plays chats against one address, a thread for each chat."""

    def __init__(self, host, port, chats):
        self.host, self.port, self.chats = host, port, chats
        self.turns = []
        self.stopped = threading.Event()
        self.connections = set()

    def run(self, watch):
        """Plays to the end, calling `watch()` several times a second; what it raises ends the play."""
        threads = [threading.Thread(target=self.play, args=(chat,), daemon=True) for chat in self.chats]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
                    watch()
        finally:
            # Clients first: an engine that still has requests is slow to end.
            self.stopped.set()
            for connection in list(self.connections):
                with contextlib.suppress(OSError, AttributeError):  # closed, or not open yet
                    connection.sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                if thread.ident:
                    thread.join(1)
        return self.turns

    def play(self, chat):
        messages = [{"role": "system", "content": SYSTEM}]
        self.stopped.wait(chat.begins)
        for number, (question, think) in enumerate(zip(chat.questions, chat.thinks)):
            if self.stopped.is_set():
                break
            turn = Turn(chat.id, number)
            messages.append({"role": "user", "content": question})
            connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_SECONDS)
            self.connections.add(connection)
            try:
                answer = ask(connection, chat, messages, turn)
                messages.append({"role": "assistant", "content": answer})
            except Exception as problem:  # of whatever kind, it is one failed turn
                turn.error = f"{type(problem).__name__}: {problem}"
                messages.pop()  # the person goes on with the next question
            finally:
                connection.close()
                self.connections.discard(connection)
            if not self.stopped.is_set():
                self.turns.append(turn)
            self.stopped.wait(think)
