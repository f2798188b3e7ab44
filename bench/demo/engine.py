"""Runs one llama.cpp server on 127.0.0.1, until SIGTERM.

    engine.py MODEL PORT SLOTS CONTEXT CACHE_RAM_MIB

CONTEXT is divided among the slots. CACHE_RAM_MIB is the store for prompts that lost their slot; 0 is
none. With LLAMA_SERVER in the environment it becomes that binary; without, it is the same server out
of the xllamacpp package, which the interpreter that runs this file must have.
"""

import os
import signal
import sys


def server_command(binary, model, port, slots, context, cache_ram):
    # One thread, and no spinning while it waits: three engines have to share a laptop.
    return [
        binary, "--model", model, "--alias", "tiny", "--host", "127.0.0.1", "--port", port,
        "--parallel", slots, "--ctx-size", context, "--cache-ram", cache_ram,
        "--threads", "1", "--threads-batch", "1", "--poll", "0", "--batch-size", "512", "--ubatch-size", "512",
        "--metrics", "--slots", "--no-warmup",
    ]  # fmt: skip


def serve(model, port, slots, context, cache_ram):
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = model
    # A set, a list or a string, depending on the version.
    alias = type(p.model_alias)
    p.model_alias = "tiny" if alias is str else alias(["tiny"])
    p.hostnames = ["127.0.0.1"]
    p.port = port
    p.n_parallel = slots
    p.n_ctx = context
    p.cache_ram_mib = cache_ram
    p.kv_unified = False
    p.endpoint_metrics = p.endpoint_slots = True
    p.warmup = False
    p.n_batch = p.n_ubatch = 512
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    p.cpuparams.poll = 0
    server = xllamacpp.Server(p)
    print("listening on", server.listening_address, flush=True)
    # Not sys.exit: the server's own end waits for its requests, for ever if a client hangs.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while True:
        signal.pause()


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    binary = os.environ.get("LLAMA_SERVER")
    if binary:
        os.execv(binary, server_command(binary, *sys.argv[1:]))
    serve(sys.argv[1], *(int(a) for a in sys.argv[2:]))
