#!/usr/bin/env python3
"""Decode speed of mistral.rs on one GGUF file, as one line of JSON. Started by peers.py for each round.

    PYTHONPATH=FOLDER_OF_THE_WHEEL peer_mistral.py MODEL.gguf THREADS TOKENS

mistral.rs has a program of its own, but no package brings it; this asks the same engine through its Python module.
"""

import json
import os
import sys
import time

# With the chat template some forty tokens: decode starts near position 0, where the others start.
PROMPT = "Once upon a time"
# mistral.rs brings its weights into the form that it computes with when it first uses them.
WARM_UP_TOKENS = 4


def decode(runner, module, tokens):
    """(tokens generated, seconds from the first to the last)"""
    request = module.ChatCompletionRequest(
        messages=PROMPT, model="default", max_tokens=tokens, temperature=0.0, stream=True
    )
    first = last = usage = None
    chunks = 0
    for chunk in runner.send_chat_completion_request(request):
        last = time.monotonic()
        first = first or last
        chunks += 1
        usage = getattr(chunk, "usage", None) or usage
    if first is None:
        sys.exit("peer_mistral: the answer had no tokens")
    # One chunk is one token; the count of the last chunk says whether that held.
    generated = usage.completion_tokens if usage else chunks
    return generated, last - first


def main():
    model, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Some of its pools have a thread for each processor that they may run on, whatever RAYON_NUM_THREADS says.
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    import mistralrs  # after the two lines above, which it reads when it is loaded

    folder, name = os.path.split(os.path.abspath(model))
    runner = mistralrs.Runner(
        which=mistralrs.Which.GGUF(quantized_model_id=folder, quantized_filename=name),
        token_source="none",
        prefix_cache_n=0,
        max_seqs=1,
    )
    decode(runner, mistralrs, WARM_UP_TOKENS)
    generated, seconds = decode(runner, mistralrs, tokens)
    if generated < 2 or seconds <= 0:
        sys.exit(f"peer_mistral: the answer ended after {generated} token(s)")
    # The log of mistral.rs also goes to the standard output.
    print("\n" + json.dumps({"generated": generated, "tokens_per_second": (generated - 1) / seconds}), flush=True)


if __name__ == "__main__":
    main()
