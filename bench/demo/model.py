"""Makes the tiny model: a llama with random weights, 5 MB, from nothing but the packages.

    model.py OUT.gguf [--seed N] [--tokenizer DIR] [--template FILE]          needs numpy, gguf, tokenizers

With --tokenizer the same tokenizer and template are written as model repositories have them, for whoever reads
prompts as the engine does; --template is a chat template other than the plain one.

Its answers are nonsense, but its prefill and its cache are real, and that is all a picker is about:
a prompt costs time in proportion to what is not cached. Same seed, same weights.
"""

import argparse
import json
import pathlib
import pydoc_data.topics

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, CONTEXT, VOCABULARY = 2, 256, 704, 4, 2, 16384, 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer():
    """A byte-level BPE trained on Python's own help texts, the one English corpus every Python has.

    They differ a little from one Python version to the next, and so does the vocabulary.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL],
        show_progress=False,
    )
    made.train_from_iterator((text for _, text in sorted(pydoc_data.topics.topics.items())), trainer)
    return made


def write_tokenizer(folder, made, template):
    """The tokenizer as a folder of `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(made.to_str(pretty=False) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write(path, seed, made, template):
    count = made.get_vocab_size()
    tokens = [made.id_to_token(i) for i in range(count)]
    merges = json.loads(made.to_str())["model"]["merges"]
    kind = gguf.TokenType

    out = gguf.GGUFWriter(path, "llama")
    out.add_name("tiny-random")
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    out.add_context_length(CONTEXT)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(FFN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_rope_freq_base(10000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(count)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types([kind.CONTROL if t in SPECIAL else kind.NORMAL for t in tokens])
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    out.add_bos_token_id(0)
    out.add_eos_token_id(2)
    out.add_eot_token_id(2)
    out.add_pad_token_id(0)
    out.add_add_bos_token(False)
    out.add_chat_template(template)

    random = np.random.default_rng(seed)

    def matrix(name, rows, columns, scale=1.0, zero=()):
        x = (random.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float16)
        x[list(zero)] = 0
        out.add_tensor(name, x)

    def ones(name):
        out.add_tensor(name, np.ones(HIDDEN, np.float32))

    # A token that ends the answer, or is not plain ASCII, is never the likeliest one: with its
    # output row at zero, answers keep their length and stay readable JSON.
    plain = {chr(c) for c in range(33, 127)} | {"Ġ"}
    never = [i for i, t in enumerate(tokens) if t in SPECIAL or not plain.issuperset(t)]
    kv = HIDDEN // HEADS * KV_HEADS
    matrix("token_embd.weight", count, HIDDEN, scale=np.sqrt(HIDDEN))
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        ones(block + "attn_norm.weight")
        matrix(block + "attn_q.weight", HIDDEN, HIDDEN)
        matrix(block + "attn_k.weight", kv, HIDDEN)
        matrix(block + "attn_v.weight", kv, HIDDEN)
        matrix(block + "attn_output.weight", HIDDEN, HIDDEN)
        ones(block + "ffn_norm.weight")
        matrix(block + "ffn_gate.weight", FFN, HIDDEN)
        matrix(block + "ffn_up.weight", FFN, HIDDEN)
        matrix(block + "ffn_down.weight", HIDDEN, FFN)
    ones("output_norm.weight")
    matrix("output.weight", count, HIDDEN, scale=4.0, zero=never)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make a tiny llama with random weights")
    parser.add_argument("out")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tokenizer", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--template", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    made = tokenizer()
    template = arguments.template.read_text() if arguments.template else TEMPLATE
    if arguments.tokenizer:
        write_tokenizer(arguments.tokenizer, made, template)
    write(arguments.out, arguments.seed, made, template)
