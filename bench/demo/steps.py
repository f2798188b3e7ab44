"""How a set-up runs its steps: each to its end or not at all, and one set-up at a time."""

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
from pathlib import Path


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
