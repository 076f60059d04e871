"""The order of training data as one would write it down: whole streams in memory, one token after another.

It shares no code with tokshard.runtime: keys, permutation, windows, packing and mixing are written again, from the
rules.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from math import ceil, floor
from typing import Any

MASK = (1 << 64) - 1


def words(
    seed: int, purpose: str, corpus: str = "", stream: int = 0, epoch: int = 0, window: int = 0, count: int = 16
) -> list[int]:
    found: list[int] = []
    for index in range(ceil(count / 8)):
        fields = (1).to_bytes(4, "little") + purpose.encode().ljust(16, b"\0") + seed.to_bytes(8, "little")
        fields += bytes.fromhex(corpus).ljust(32, b"\0")
        fields += b"".join(number.to_bytes(8, "little") for number in (stream, epoch, window))
        digest = hashlib.blake2b(fields + index.to_bytes(4, "little")).digest()
        found += [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 64, 8)]
    return found


def keyed_hash(index: int, key: list[int]) -> int:
    value = (index + key[0]) * 0x9E3779B97F4A7C15 & MASK
    for word in key[1:3]:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
        value = (value ^ value >> 31) + word & MASK
    return value


def permutation(length: int, key: list[int]) -> list[int]:
    if length <= 65_536:
        return sorted(range(length), key=lambda index: keyed_hash(index, key))
    bits = (length - 1).bit_length()

    def once(index: int) -> int:
        for number in range(8):
            index = (index * (key[number] | 1) + (key[8 + number] | 1)) % (1 << bits)
            index ^= index >> (bits + 1) // 2
        return index

    def walk(index: int) -> int:
        index = once(index)
        while index >= length:
            index = once(index)
        return index

    return [walk(index) for index in range(length)]


def part_of(take: float, blocks: int) -> int:
    return floor(Fraction(take) * blocks + Fraction(1, 2))


Token = tuple[int, int, int, bool]
"""(document, place in it, piece of the stream, whether it is the first token of its piece)."""


def stream(
    documents: list[list[int]],
    *,
    seed: int,
    fingerprint: str,
    block: int,
    window_blocks: int,
    epochs: int,
    first_epoch: int = 0,
    take: float = 1.0,
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int]]]:
    """Tokens (document, place, piece) of so many epochs, and windows (epoch, index, start, stop)."""
    flat = [(number, place) for number, document in enumerate(documents) for place in range(len(document))]
    tokens: list[tuple[int, int, int]] = []
    windows = []
    piece_number = 0
    for epoch in range(first_epoch, first_epoch + epochs):
        full = [flat[start : start + block] for start in range(0, len(flat) - block + 1, block)]
        tail = flat[len(full) * block :]
        dealt = permutation(len(full), words(0, "deal", fingerprint))[: part_of(take, len(full))]
        full = [full[index] for index in dealt]
        tail = tail if take == 1 else []
        order = permutation(len(full), words(seed, "blocks", fingerprint, 0, epoch))
        shuffled = [full[index] for index in order]
        groups = [shuffled[start : start + window_blocks] for start in range(0, len(shuffled), window_blocks)] or [[]]
        if tail:
            groups[-1] = [*groups[-1], tail]
        for index, group in enumerate(groups):
            pieces: list[list[tuple[int, int]]] = []
            for part in group:
                previous = None
                for document, place in part:
                    if document != previous:
                        pieces.append([])
                    pieces[-1].append((document, place))
                    previous = document
            start = len(tokens)
            for entry in permutation(len(pieces), words(seed, "pieces", fingerprint, 0, epoch, index)):
                tokens += [(document, place, piece_number) for document, place in pieces[entry]]
                piece_number += 1
            windows.append((epoch, index, start, len(tokens)))
    return tokens, windows


def corpus_samples(
    documents: list[list[int]],
    *,
    seed: int,
    fingerprint: str,
    block: int,
    window_blocks: int,
    seq_len: int,
    count: int,
    epochs: int | None = None,
    first_epoch: int = 0,
    take: float = 1.0,
) -> list[dict[str, Any]]:
    """The first `count` samples of one corpus."""
    total = sum(map(len, documents))
    if take < 1:
        total = part_of(take, total // block) * block
    needed = epochs if epochs is not None else ceil((count + 1) * seq_len / total) + 2
    # a window is only complete with the samples that start in it, so one epoch more is laid out than is read
    tokens, windows = stream(
        documents,
        seed=seed,
        fingerprint=fingerprint,
        block=block,
        window_blocks=window_blocks,
        epochs=needed,
        first_epoch=first_epoch,
        take=take,
    )
    slices: list[int] = []
    for epoch, index, start, stop in windows:
        starting = [number for number in range(len(tokens) // seq_len + 1) if start <= number * seq_len < stop]
        inside = [number for number in starting if (number + 1) * seq_len <= stop]
        order = permutation(len(inside), words(seed, "samples", fingerprint, 0, epoch, index))
        slices += [inside[entry] for entry in order] + [number for number in starting if number not in inside]
    return [_row(documents, tokens, number, seq_len) for number in slices[:count]]


def _row(documents: list[list[int]], tokens: list[tuple[int, int, int]], number: int, seq_len: int) -> dict[str, Any]:
    ids, labels, positions, pieces = [], [], [], []
    previous, position = None, 0
    for at in range(number * seq_len, min(len(tokens), (number + 1) * seq_len)):
        document, place, piece = tokens[at]
        position = position + 1 if piece == previous else 0
        previous = piece
        if position == 0:
            pieces.append([document, place, place])
        pieces[-1][2] = place + 1
        ids.append(documents[document][place])
        positions.append(position)
        if place + 1 < len(documents[document]):
            labels.append(documents[document][place + 1])
        else:
            labels.append(-100)
    missing = seq_len - len(ids)
    return {
        "input_ids": ids + [0] * missing,
        "labels": labels + [-100] * missing,
        "position_ids": positions + list(range(missing)),
        "pieces": [tuple(piece) for piece in pieces],
    }


class Node:
    """A node of the tree over corpora: it rounds the share of its left half, one sample after another."""

    def __init__(self, corpora: list[int]) -> None:
        self.corpora = corpora
        middle = len(corpora) // 2
        self.halves = [Node(half) if len(half) > 1 else half[0] for half in (corpora[:middle], corpora[middle:])]
        self.left = corpora[:middle]
        self.given = 0
        self.remainder = 1 << 63

    def set_weights(self, weights: list[Fraction]) -> None:
        total = sum((weights[corpus] for corpus in self.corpora), Fraction(0))
        left = sum((weights[corpus] for corpus in self.left), Fraction(0))
        self.share = int((1 << 64) * left / total) if total else 0
        self.given_before, self.start, self.gone_left = self.given, self.remainder, 0
        for half in self.halves:
            if isinstance(half, Node):
                half.set_weights(weights)

    def next(self) -> int:
        count = self.given - self.given_before + 1
        if self.share in (0, 1 << 64):
            is_left = self.share > 0
        else:
            line = self.start + count * self.share
            is_left = line // (1 << 64) > self.gone_left
            self.remainder += self.share - (is_left << 64)
        self.given += 1
        self.gone_left += is_left
        half = self.halves[0 if is_left else 1]
        return half.next() if isinstance(half, Node) else half


def mixture(changes: list[tuple[int, list[float]]], count: int) -> list[int]:
    """The corpus of each of the first `count` global samples."""
    num_corpora = len(changes[0][1])
    if num_corpora == 1:
        return [0] * count
    root = Node(list(range(num_corpora)))
    weights = dict(changes)
    found = []
    for sample in range(count):
        if sample in weights:
            root.set_weights([Fraction(weight) for weight in weights[sample]])
        found.append(root.next())
    return found
