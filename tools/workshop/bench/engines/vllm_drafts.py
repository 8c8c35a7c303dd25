"""vLLM's own generation with and without n-gram drafts, in turns; a program of vLLM's environment.

It reads JSON: model, prompts (token ids), sequences, temperature, new_tokens, rounds, num_drafts; and prints a line of
JSON: seconds of each round and tokens, by way.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def _main() -> None:
    import vllm as library

    vllm: Any = library
    given = json.load(sys.stdin)
    drafts = {"method": "ngram", "num_speculative_tokens": given["num_drafts"], "prompt_lookup_max": 4}
    sizes = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": given["sequences"]}
    engines = {
        way: vllm.LLM(given["model"], enable_prefix_caching=False, speculative_config=config, **sizes)
        for way, config in (("off", None), ("ngram", drafts))
    }
    params = vllm.SamplingParams(temperature=given["temperature"], max_tokens=given["new_tokens"], seed=7)
    prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    found: dict[str, dict[str, Any]] = {way: {"seconds": [], "tokens": 0} for way in engines}
    for _ in range(given["rounds"] + 1):
        for way, llm in engines.items():
            start_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[way]["seconds"].append(time.perf_counter() - start_s)
            found[way]["tokens"] = sum(len(one.outputs[0].token_ids) for one in outputs)
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    _main()
