#!/usr/bin/env python3
"""Decode speed of mistral.rs on one GGUF file. Used by peers.py.

    PYTHONPATH=FOLDER_OF_THE_WHEEL peer_mistral.py serve SOCKET MODEL.gguf THREADS
    peer_mistral.py ask SOCKET TOKENS      prints one line of JSON

mistral.rs has a program of its own, but no package brings it; this asks the same engine through its Python module. It
takes most of a minute to load a large file, so one process loads it and waits, idle, while others are measured; the one
that asks lives as long as the measurement. The server ends when its standard input does, so nobody has to find it.
"""

import json
import os
import socket
import sys
import threading
import time

# With the chat template some forty tokens: decode starts near position 0, where the others start.
PROMPT = "Once upon a time"


def decode(runner, module, tokens):
    """{"generated": .., "tokens_per_second": ..}, from the first token to the last"""
    request = module.ChatCompletionRequest(
        messages=PROMPT, model="default", max_tokens=tokens, temperature=0.0, stream=True
    )
    first = last = usage = None
    generated = 0
    for chunk in runner.send_chat_completion_request(request):
        last = time.monotonic()
        first = first or last
        generated += 1
        usage = getattr(chunk, "usage", None) or usage
    # One chunk is one token, unless the last one counts otherwise.
    generated = usage.completion_tokens if usage else generated
    if generated < 2 or last <= first:
        return {"problem": f"the answer of mistral.rs ended after {generated} token(s)"}
    return {"generated": generated, "tokens_per_second": (generated - 1) / (last - first)}


def serve(path, model, threads):
    threading.Thread(target=end_with_input, daemon=True).start()
    # Some of its pools have a thread for each processor that they may run on, whatever RAYON_NUM_THREADS says.
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    import mistralrs  # after the two lines above, which it reads when it is loaded

    folder, name = os.path.split(model)
    runner = mistralrs.Runner(
        which=mistralrs.Which.GGUF(quantized_model_id=folder, quantized_filename=name),
        token_source="none",
        # A cached prompt would be no advantage in decode, but it would be kept.
        prefix_cache_n=0,
        max_seqs=1,
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as lines:
                lines.write(json.dumps(decode(runner, mistralrs, int(lines.readline()))) + "\n")


def end_with_input():
    sys.stdin.read()
    # Its engine thread cannot be asked to end.
    os._exit(0)


def ask(path, tokens):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as lines:
            lines.write(f"{tokens}\n")
            lines.flush()
            answer = json.loads(lines.readline() or '{"problem": "mistral.rs ended"}')
    if "problem" in answer:
        sys.exit(answer["problem"])
    print(json.dumps(answer))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        ask(sys.argv[2], int(sys.argv[3]))
