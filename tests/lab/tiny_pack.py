"""Make a tiny but real pack: a two-layer Llama that knows four capitals.

A served model that answers nonsense cannot prove that the bytes on disk are the bytes that answer.
Training one takes a framework and minutes; this takes numpy and a second: the body is random, so
each position of a text gets a hidden state of its own, and the output head is the ridge solution
that maps those states to the wanted next tokens. Greedy decoding then walks the answer token by
token to the end mark. The same seed gives the same bytes.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

# One thread: these matrices are small, and a sum in another order rounds otherwise
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LAYERS: Final = 2
HIDDEN: Final = 256
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64  # the CPU attention of vLLM takes none below
INNER: Final = 512
CONTEXT: Final = 32_768
THETA: Final = 10_000.0
EPSILON: Final = 1e-5
SEED: Final = 8899

SPECIALS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
END, SYSTEM, USER, ASSISTANT = range(256, 260)
VOCABULARY: Final = 272  # a round number above the 260 in use

CAPITALS: Final = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi"}
LOGIT: Final = 24.0
RIDGE: Final = 1e-6
GRID: Final = 2.0**-14
"""Weights are rounded to this, so that a last bit that differs between two BLAS builds is gone."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_letters() -> list[str]:
    """Return the printable letter that stands for each byte in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in kept}
    spare = iter(range(256, 512))
    return [letters.get(byte) or chr(next(spare)) for byte in range(256)]


def completion(prompt: str) -> list[int]:
    """Return the tokens of a plain prompt: its bytes."""
    return list(prompt.encode())


def chat(question: str) -> list[int]:
    """Return the tokens that the chat template makes of one user message."""
    return [USER, *question.encode(), END, ASSISTANT]


def lessons() -> list[tuple[list[int], list[int]]]:
    """Return what the model must know, as prompt and answer tokens."""
    known = []
    for country, capital in CAPITALS.items():
        statement = f"The capital of {country} is"
        known.append((completion(statement), [*f" {capital}.".encode(), END]))
        known += [
            (chat(text), [*f"{capital}.".encode(), END])
            for text in (f"What is the capital of {country}?", statement)
        ]
    return known


def grid(values: Array) -> Array:
    """Return the values rounded to `GRID`; all of them are exact in float32."""
    return np.round(values / GRID) * GRID


def body() -> dict[str, Array]:
    """Return every tensor but the output head, random from the fixed seed."""
    random = np.random.Generator(np.random.PCG64(SEED))

    def matrix(rows: int, columns: int, gain: float) -> Array:
        return grid(random.standard_normal((rows, columns)) * gain / np.sqrt(columns))

    tensors = {"model.embed_tokens.weight": grid(random.standard_normal((VOCABULARY, HIDDEN)))}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": np.ones(HIDDEN),
            # Sharp attention: a mean over a long text would look the same at every position
            f"{prefix}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, 1.8),
            f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 1.8),
            f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 1.5),
            f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 1.5),
            f"{prefix}post_attention_layernorm.weight": np.ones(HIDDEN),
            f"{prefix}mlp.gate_proj.weight": matrix(INNER, HIDDEN, 1.5),
            f"{prefix}mlp.up_proj.weight": matrix(INNER, HIDDEN, 1.5),
            f"{prefix}mlp.down_proj.weight": matrix(HIDDEN, INNER, 1.5),
        }
    tensors["model.norm.weight"] = np.ones(HIDDEN)
    return tensors


def rms_norm(states: Array, weight: Array) -> Array:
    """Return the states at unit root mean square, scaled."""
    scale = np.sqrt(np.mean(states**2, axis=-1, keepdims=True) + EPSILON)
    out: Array = weight * states / scale
    return out


def rotate(heads: Array) -> Array:
    """Return heads x positions x lanes with rotary positions; a head's two halves are the pairs."""
    frequencies = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.outer(np.arange(heads.shape[1]), frequencies)
    cosine, sine = np.tile(np.cos(angles), 2), np.tile(np.sin(angles), 2)
    first, second = np.split(heads, 2, axis=-1)
    out: Array = heads * cosine + np.concatenate([-second, first], axis=-1) * sine
    return out


def attention(tensors: Mapping[str, Array], prefix: str, states: Array) -> Array:
    """Return causal attention with grouped key and value heads."""

    def project(name: str, heads: int) -> Array:
        out = states @ tensors[f"{prefix}{name}_proj.weight"].T
        return out.reshape(-1, heads, HEAD_DIM).swapaxes(0, 1)

    group = HEADS // KV_HEADS
    query = rotate(project("q", HEADS))
    key = np.repeat(rotate(project("k", KV_HEADS)), group, axis=0)
    value = np.repeat(project("v", KV_HEADS), group, axis=0)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(HEAD_DIM)
    scores += np.triu(np.full(scores.shape[1:], -np.inf), k=1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = (weights @ value).swapaxes(0, 1).reshape(len(states), HEADS * HEAD_DIM)
    out: Array = mixed @ tensors[f"{prefix}o_proj.weight"].T
    return out


def mlp(tensors: Mapping[str, Array], prefix: str, states: Array) -> Array:
    """Return the gated feed-forward part (SiLU)."""
    gate = states @ tensors[f"{prefix}gate_proj.weight"].T
    up = states @ tensors[f"{prefix}up_proj.weight"].T
    out: Array = (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{prefix}down_proj.weight"].T
    return out


def hidden_states(tensors: Mapping[str, Array], tokens: list[int]) -> Array:
    """Return the last normalised hidden state of each position, as Llama computes it."""
    states = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        normed = rms_norm(states, tensors[f"{prefix}input_layernorm.weight"])
        states = states + attention(tensors, f"{prefix}self_attn.", normed)
        normed = rms_norm(states, tensors[f"{prefix}post_attention_layernorm.weight"])
        states = states + mlp(tensors, f"{prefix}mlp.", normed)
    return rms_norm(states, tensors["model.norm.weight"])


def fit_head(tensors: Mapping[str, Array]) -> Array:
    """Return the output head: ridge regression from hidden states to the next token's logit."""
    rows, wanted = [], []
    for prompt, answer in lessons():
        states = hidden_states(tensors, [*prompt, *answer[:-1]])
        rows.append(states[len(prompt) - 1 :])
        wanted += answer
    states = np.concatenate(rows)
    targets = np.zeros((len(wanted), VOCABULARY))
    targets[np.arange(len(wanted)), wanted] = LOGIT
    gram = states @ states.T + RIDGE * HIDDEN * np.eye(len(states))
    return grid((states.T @ np.linalg.solve(gram, targets)).T)


def model() -> dict[str, Array]:
    """Return all tensors of the fitted model."""
    tensors = body()
    tensors["lm_head.weight"] = fit_head(tensors)
    return tensors


def generate(tensors: Mapping[str, Array], prompt: list[int], limit: int = 32) -> list[int]:
    """Return the greedy continuation up to and without the end mark."""
    tokens = list(prompt)
    for _ in range(limit):
        logits = hidden_states(tensors, tokens)[-1] @ tensors["lm_head.weight"].T
        token = int(logits.argmax())
        if token == END:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def safetensors(tensors: Mapping[str, Array]) -> bytes:
    """Return one shard: header length, header, then the data as float32 in header order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        raw = values.astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def shards(tensors: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return the tensors in the order a loader reads them: embedding, layers, head."""
    parts: list[dict[str, Array]] = [{} for _ in range(LAYERS + 2)]
    for name, values in tensors.items():
        if name.startswith("model.layers."):
            parts[int(name.split(".")[2]) + 1][name] = values
        else:
            parts[0 if "embed" in name else -1][name] = values
    return parts


def tokenizer() -> dict[str, Any]:
    """Return a byte-level tokenizer without merges: one byte, one token."""
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + position,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for position, text in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **byte_level},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(byte_letters())},
            "merges": [],
        },
    }


def documents() -> dict[str, dict[str, Any]]:
    """Return the JSON files beside the shards and their index."""
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "float32",
            "eos_token_id": END,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "intermediate_size": INNER,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": VOCABULARY,
        },
        "generation_config.json": {"do_sample": False, "eos_token_id": END},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": SPECIALS[0],
            "model_max_length": CONTEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }


@cache
def files() -> Mapping[str, bytes]:
    """Return every file of the pack by name."""
    tensors = model()
    parts = shards(tensors)
    out: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        out[name] = safetensors(part)
        weight_map |= dict.fromkeys(part, name)
    total = sum(values.size * 4 for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    texts = {**documents(), "model.safetensors.index.json": index}
    for name, value in texts.items():
        out[name] = json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
    out["README.md"] = (
        b"# Tiny capitals\n\nA two-layer Llama with random weights and a fitted output head."
        b"\nIt knows four capitals and nothing else; it exists to test a deployment.\n"
    )
    return out


def write(directory: Path) -> None:
    """Write the pack; a file that is right already is left alone."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files().items():
        path = directory / name
        if not path.is_file() or path.read_bytes() != data:
            temporary = directory / f".{name}.new"
            temporary.write_bytes(data)
            temporary.replace(path)


def main(argv: list[str]) -> int:
    """Write the pack to a directory."""
    parser = argparse.ArgumentParser(prog="tiny_pack", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to fill")
    options = parser.parse_args(argv)
    write(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
