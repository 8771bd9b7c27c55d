"""Makes `tiny.gguf`: a llama with random weights, so that demo and tests run a real engine.

It computes as a large model does (prefill in proportion to the prompt, a KV cache that pays, tokens
that stream) and weighs half a megabyte. What it says means nothing but looks like words: one
dimension of the hidden state is held constant, and the output matrix uses it as a bias towards
letters and spaces. The end token is as good as never drawn: an answer has exactly `max_tokens`
tokens, so each request should say how many.

One byte of text is one token, so prompt lengths can be written down without a tokenizer. Run as
`python -m ops.tiny_model.make_tiny_model [FILE]`; the same bytes come out on any machine, and
a test holds the shipped file to that.
"""

import math
import string
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

SEED = 20261129
SHIPPED_FILE = Path(__file__).with_name("tiny.gguf")

CONTEXT_TOKENS = 16_384
"""Twice the longest prompt of the tests (8k); the demo's system prompts have 2,000 tokens."""

HIDDEN = 64
LAYERS = 2
HEADS = 4
FEED_FORWARD = 128
RMS_EPSILON = 1e-5
ROPE_BASE = 10_000.0

BIAS_DIMENSION = 0
"""The dimension of the hidden state that no layer writes to: it carries the output bias."""

BIAS_INPUT = 2.0
SPACE_BIAS = 0.7
"""Makes words of about ten letters."""

NEVER_BIAS = -16.0
"""Puts the odds of any token that is not a letter or a space under 1 : 10^9 at temperature 1."""

UNKNOWN, BEGIN, END, TURN_BEGIN, TURN_END = range(5)
CONTROL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
SPACE = "\u2581"
"""How a sentencepiece vocabulary spells the space; without it a space would be three bytes."""

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML in the order given, tools before all: chats that share a system prompt share a prefix."""

Weights = npt.NDArray[np.float32]


class Random:
    """Uniform weights from raw PCG64 bits, which no numpy release may change."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def matrix(self, rows: int, columns: int) -> Weights:
        """Draw a (rows, columns) matrix of variance 1 / columns."""
        raw = np.asarray(self._bits.random_raw(rows * columns))
        unit = (raw >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
        scale = np.float32(math.sqrt(3 / columns))
        return (unit * scale).reshape(rows, columns)


def vocabulary() -> tuple[list[bytes], list[gguf.TokenType]]:
    """List the tokens in order of id, with their kinds: controls, the space, then 256 bytes."""
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * (len(CONTROL_TOKENS) - 1)
    tokens = [token.encode() for token in CONTROL_TOKENS]
    tokens += [SPACE.encode()] + [b"<0x%02X>" % byte for byte in range(256)]
    kinds += [gguf.TokenType.NORMAL] + [gguf.TokenType.BYTE] * 256
    return tokens, kinds


def embedding(random: Random, tokens: int) -> Weights:
    """Draw the embedding matrix, the bias dimension constant."""
    matrix = random.matrix(tokens, HIDDEN) * np.float32(math.sqrt(HIDDEN))
    matrix[:, BIAS_DIMENSION] = BIAS_INPUT
    return matrix


def output(random: Random, tokens: list[bytes]) -> Weights:
    """Draw the output matrix, biased so that letters and spaces come out."""
    letters = {b"<0x%02X>" % ord(letter) for letter in string.ascii_lowercase}
    bias = {SPACE.encode(): SPACE_BIAS} | dict.fromkeys(letters, 0.0)
    matrix = random.matrix(len(tokens), HIDDEN)
    matrix[:, BIAS_DIMENSION] = [bias.get(token, NEVER_BIAS) for token in tokens]
    return matrix


def writer_to_residual(random: Random, columns: int) -> Weights:
    """Draw a matrix whose result is added to the hidden state, the bias dimension left alone."""
    matrix = random.matrix(HIDDEN, columns)
    matrix[BIAS_DIMENSION, :] = 0
    return matrix


def layer(random: Random, index: int) -> dict[str, Weights]:
    """Draw the tensors of one transformer block, by name."""
    ones = np.ones(HIDDEN, dtype=np.float32)
    return {
        f"blk.{index}.attn_norm.weight": ones,
        f"blk.{index}.attn_q.weight": random.matrix(HIDDEN, HIDDEN),
        f"blk.{index}.attn_k.weight": random.matrix(HIDDEN, HIDDEN),
        f"blk.{index}.attn_v.weight": random.matrix(HIDDEN, HIDDEN),
        f"blk.{index}.attn_output.weight": writer_to_residual(random, HIDDEN),
        f"blk.{index}.ffn_norm.weight": ones,
        f"blk.{index}.ffn_gate.weight": random.matrix(FEED_FORWARD, HIDDEN),
        f"blk.{index}.ffn_up.weight": random.matrix(FEED_FORWARD, HIDDEN),
        f"blk.{index}.ffn_down.weight": writer_to_residual(random, FEED_FORWARD),
    }


def describe(writer: gguf.GGUFWriter) -> None:
    """Write what kind of model this is."""
    writer.add_name("inferlane-tiny")
    writer.add_description("Random weights, for tests and demonstrations of scheduling.")
    writer.add_license("Apache-2.0")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def describe_tokenizer(
    writer: gguf.GGUFWriter, tokens: list[bytes], kinds: list[gguf.TokenType]
) -> None:
    """Write the byte-level vocabulary and the chat template."""
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(TURN_END)
    writer.add_add_bos_token(value=True)
    writer.add_add_space_prefix(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_tiny_model(path: Path) -> None:
    """Write the model file, the same bytes each time."""
    random = Random(SEED)
    tokens, kinds = vocabulary()
    tensors = {"token_embd.weight": embedding(random, len(tokens))}
    for index in range(LAYERS):
        tensors |= layer(random, index)
    tensors["output_norm.weight"] = np.ones(HIDDEN, dtype=np.float32)
    tensors["output.weight"] = output(random, tokens)
    writer = gguf.GGUFWriter(path, "llama")
    describe(writer)
    describe_tokenizer(writer, tokens, kinds)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the model where the command line says, or over the shipped file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED_FILE
    write_tiny_model(path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
