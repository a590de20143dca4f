"""Generate with a Hugging Face Llama (small, random) whose attention is dilated.

pip install ".[hf]", in a clone
python examples/hf_llama.py
"""

import argparse

import torch
import transformers

from dilated_attention_pytorch.integrations import huggingface


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    huggingface.register({"dilated": "dilated:32x1,128x4"})
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        attn_implementation="dilated",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 100, (1, arguments.prompt))
    settings = {"max_new_tokens": arguments.steps, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    print("generated:", found[0, arguments.prompt :].tolist())

    with torch.no_grad():
        whole = model(found[:, :-1]).logits[0, arguments.prompt - 1 :].argmax(-1)
    assert torch.equal(whole, found[0, arguments.prompt :])
    print("the full forward pass agrees with every step")

    model.set_attn_implementation("sdpa")
    print(
        "dense    :",
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, -arguments.steps :].tolist(),
    )


if __name__ == "__main__":
    main()
