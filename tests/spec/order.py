"""A slow model of ORDER.md and ROWS.md, and of another seq_len of STATE.md, written from the pages alone.

What they refuse is not in it. Headlines name the sections and letters are theirs. Numbers are integers and Fractions.
Nothing walks over a corpus, but the pieces of a window are listed. A plan is what is hashed and weighed; a run is a job
that reads it from a cursor on.
"""

# ruff: noqa: N803, N806 - the letters of the page

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple

# ------------------------------------------------------------------------------------------ ORDER.md 1. Notation

ORDER_VERSION = 1
WORD = 2**64
G = 0x9E3779B97F4A7C15
NO_LABEL = -100


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Documents:
    """The content of a corpus: T tokens cut into documents that start at `starts`.

    `target_weights` are, if it has loss spans, those of the tokens of each document, 0 for one that is no target.
    """

    content: bytes
    starts: Sequence[int]
    num_tokens: int
    token: Callable[[int], int]
    target_weights: Sequence[Sequence[float]] | None = None

    @classmethod
    def of_lengths(
        cls,
        content: bytes,
        lengths: Sequence[int],
        token: Callable[[int], int],
        target_weights: Sequence[Sequence[float]] | None = None,
    ) -> Documents:
        ends = list(accumulate(lengths, initial=0))
        return cls(content, ends[:-1], ends[-1], token, target_weights)

    def next_token(self, piece: range) -> int:
        """The token of the document behind a piece of it."""
        is_end = piece.stop == self.stop(self.number_at(piece.start))
        return NO_LABEL if is_end else self.token(piece.stop)

    def label_weights(self, piece: range) -> list[float]:
        """The weights of the labels of a piece: those of the tokens behind its tokens in the document."""
        number = self.number_at(piece.start)
        behind = range(piece.start + 1, piece.stop + 1)
        weights = [1.0 if self.target_weights is None else self.weight(number, at) for at in behind]
        return [*weights[:-1], 0.0] if piece.stop == self.stop(number) else weights

    def weight(self, number: int, at: int) -> float:
        """The weight of a token of a document, in binary32; 0 behind its end."""
        weights, place = (self.target_weights or ())[number], at - self.starts[number]
        return struct.unpack("<f", struct.pack("<f", weights[place]))[0] if place < len(weights) else 0.0

    def number_at(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1

    def stop(self, number: int) -> int:
        return self.starts[number + 1] if number + 1 < len(self.starts) else self.num_tokens


@dataclass(frozen=True)
class Used:
    """A corpus as a plan uses it."""

    documents: Documents
    take: float = 1.0
    start_epoch: int = 0
    name: str = ""
    pack: str = "cut"


# ---------------------------------------------------------------------------------------------- ORDER.md 2. Keys


@dataclass(frozen=True)
class Key:
    """The sequence of words k[0], k[1], ...; `window` is the node of phases, the global sample of a transform."""

    purpose: str
    seed: int = 0
    content: bytes = bytes(32)
    stream: int = 0
    epoch: int = 0
    window: int = 0

    @lru_cache(maxsize=1000)  # noqa: B019 - keys are few
    def words(self, i: int) -> tuple[int, ...]:
        """Words 8 i to 8 i + 7."""
        head = struct.pack("<I16sQ", ORDER_VERSION, self.purpose.encode("ascii"), self.seed)
        packed = head + self.content + struct.pack("<QQQI", self.stream, self.epoch, self.window, i)
        assert len(packed) == 88
        return struct.unpack("<8Q", hashlib.blake2b(packed).digest())

    def __getitem__(self, index: int) -> int:
        return self.words(index // 8)[index % 8]


# -------------------------------------------------------------------------------------- ORDER.md 3. Permutations


def word_hash(k: Key, x: int) -> int:
    first, second, third = k.words(0)[:3]
    h = (x + first) * G % WORD
    h = (mix(h) + second) % WORD
    return (mix(h) + third) % WORD


@lru_cache(maxsize=100)
def perm(n: int, k: Key) -> Callable[[int], int]:
    if n <= 65_536:
        return sorted(range(n), key=lambda x: (word_hash(k, x), x)).__getitem__
    b = (n - 1).bit_length()
    mask, shift = 2**b - 1, (b + 1) // 2
    rounds = [(k[r] | 1, k[8 + r] | 1) for r in range(8)]

    def item(x: int) -> int:
        while True:
            for factor, term in rounds:
                x = (x * factor + term) & mask
                x ^= x >> shift
            if x < n:
                return x

    return item


# --------------------------------------------------------------- ORDER.md 4 and 5. Parts, epochs, windows, pieces


class Window(NamedTuple):
    """Window `number` of `epoch`; it covers the positions [start, stop) of the sequence of its part."""

    epoch: int
    number: int
    start: int
    stop: int


class Corpus:
    """A corpus of a plan: the letters are those of section 4."""

    def __init__(self, used: Used, seed: int, C: int, B: int, W: int, S: int) -> None:
        self.used, self.seed, self.C, self.B, self.W, self.S = used, seed, C, B, W, S
        self.is_whole = used.pack == "whole"
        self.Q = B // 128 if self.is_whole else 0
        self.T = used.documents.num_tokens
        self.F = self.T // B
        self.A = floor(Fraction(used.take) * self.F + Fraction(1, 2))
        self.tail = range(self.F * B, self.T if used.take == 1 else self.F * B)
        self.is_dealt = C > 1 and self.A >= 4 * C * W
        self.D = perm(self.F, Key("deal", content=used.documents.content))
        self.parts = [Part(self, p) for p in range(C if self.is_dealt else 1)]

    @property
    def tokens_read(self) -> int:
        """The weight by default."""
        return self.A * self.B + len(self.tail)

    @lru_cache(maxsize=8)  # noqa: B019
    def of_length(self, S: int) -> Corpus:
        """The same with another S, on which chunks depend."""
        return Corpus(self.used, self.seed, self.C, self.B, self.W, S)


class Part:
    def __init__(self, corpus: Corpus, p: int) -> None:
        self.corpus, self.p = corpus, p
        self.P = corpus.C if corpus.is_dealt else 1
        self.M = ceil_div(corpus.A - p, self.P)
        self.tail = corpus.tail if p == self.P - 1 else range(0)
        self.N = self.M * corpus.B + len(self.tail)
        tail = corpus.S * ceil_div(len(self.tail) + corpus.Q, corpus.S) if corpus.is_whole and self.tail else 0
        self.H = self.M * (corpus.B + corpus.Q) + tail if corpus.is_whole else self.N
        self.num_windows = max(1, ceil_div(self.M, corpus.W))
        if corpus.is_whole and self.num_windows == 1:
            lengths = sorted((len(chunk) for chunk in self.chunks(Window(0, 0, 0, 0))), reverse=True)
            num_rows = len(opened(lengths, corpus.S))
            self.H = (num_rows + ceil_div(num_rows, 128)) * corpus.S

    def key(self, purpose: str, epoch: int, window: int = 0) -> Key:
        corpus = self.corpus
        epoch += corpus.used.start_epoch
        return Key(purpose, corpus.seed, corpus.used.documents.content, self.p, epoch, window)

    def window_at(self, position: int) -> Window:
        epoch, inside = divmod(position, self.H)
        W, B = self.corpus.W, self.corpus.B + self.corpus.Q
        number = min(inside // (W * B), self.num_windows - 1)  # the last one has the tail, too
        is_last = number == self.num_windows - 1
        stop = (epoch + 1) * self.H if is_last else epoch * self.H + (number + 1) * W * B
        return Window(epoch, number, epoch * self.H + number * W * B, stop)

    def blocks(self, window: Window) -> list[range]:
        W, B, D = self.corpus.W, self.corpus.B, self.corpus.D
        order = perm(self.M, self.key("blocks", window.epoch))
        places = range(window.number * W, min((window.number + 1) * W, self.M))
        full = [D(self.p + self.P * order(q)) for q in places]
        last = [self.tail] if window.number == self.num_windows - 1 and self.tail else []
        return [range(j * B, (j + 1) * B) for j in full] + last

    @lru_cache(maxsize=64)  # noqa: B019
    def shuffled(self, window: Window) -> tuple[list[range], list[int]]:
        """The pieces of a window as tokens of the corpus, in the order of the sequence, and where each ends.

        Padding of rows that are packed whole are tokens below 0.
        """
        if self.corpus.is_whole:
            S, chunks = self.corpus.S, self.chunks(window)
            order = perm(len(chunks), self.key("pieces", window.epoch, window.number))
            rows = packed(
                [chunks[order(q)] for q in range(len(chunks))],
                (window.stop - window.start) // S,
                S,
                is_counted=self.num_windows == 1,
            )
            found = [piece for row in rows for piece in [*row, range(sum(map(len, row)) - S, 0)] if piece]
            return found, list(accumulate(map(len, found), initial=window.start))[1:]
        documents, pieces = self.corpus.used.documents, []
        for block in self.blocks(window):
            at, number = block.start, documents.number_at(block.start)
            while at < block.stop:
                stop = min(block.stop, documents.stop(number))
                pieces.append(range(at, stop))
                at, number = stop, number + 1
        order = perm(len(pieces), self.key("pieces", window.epoch, window.number))
        found = [pieces[order(q)] for q in range(len(pieces))]
        return found, list(accumulate(map(len, found), initial=window.start))[1:]

    def chunks(self, window: Window) -> list[range]:
        documents, Q, S, found = self.corpus.used.documents, self.corpus.Q, self.corpus.S, []
        for block in self.blocks(window):
            for number in range(documents.number_at(block.start), documents.number_at(block.stop - 1) + 1):
                end = documents.stop(number)
                for section in range(documents.starts[number], end, Q):
                    if section in block:
                        last = min(section + Q, end)
                        found += [range(chunk, min(chunk + S, last)) for chunk in range(section, last, S)]
        return found

    def read(self, start: int, stop: int) -> list[range]:
        """What the positions [start, stop) of the sequence have, piece after piece, as tokens of the corpus."""
        found = []
        while start < stop:
            window = self.window_at(start)
            pieces, ends = self.shuffled(window)
            index = bisect_right(ends, start)
            while index < len(pieces) and start < stop:
                piece, end = pieces[index], ends[index]
                first = piece.stop - (end - start)
                found.append(range(first, min(piece.stop, first + stop - start)))
                start += len(found[-1])
                index += 1
        return [piece for piece in found if piece.start >= 0]  # without padding


def opened(lengths: Sequence[int], S: int) -> list[int]:
    """The room of the rows that chunks open, each put into the row with the least room in which it fits."""
    room: list[int] = []
    for length in lengths:
        fitting = [row for row in range(len(room)) if room[row] >= length]
        if fitting:
            room[min(fitting, key=room.__getitem__)] -= length
        else:
            room.append(S - length)
    return room


def packed(chunks: Sequence[range], R: int, S: int, *, is_counted: bool = False) -> list[list[range]]:
    """The rows of a window, without padding: its chunks are given in the order of the permutation."""
    found, put_off = placed(chunks, R, S, sorted(range(len(chunks)), key=lambda q: 2 * len(chunks[q]) <= S))
    if put_off and is_counted:
        found, put_off = placed(chunks, R, S, sorted(range(len(chunks)), key=lambda q: -len(chunks[q])))
    for row in found:
        while put_off and (left := S - sum(map(len, row))):
            first = put_off.pop(0)
            row.append(first[:left])
            if first[left:]:
                put_off.insert(0, first[left:])
    assert not put_off
    return found


def placed(chunks: Sequence[range], R: int, S: int, taken: Sequence[int]) -> tuple[list[list[range]], list[range]]:
    """The rows of chunks that are taken in some order, and those that are put off."""
    rows: list[list[int]] = []  # the chunks of each open row, as they were placed
    room: list[int] = []
    turns: list[int] = []  # when each row got a chunk last
    put_off = []
    for turn, q in enumerate(taken):
        fitting = [row for row in range(len(rows)) if room[row] >= len(chunks[q])]
        if len(rows) < R and (not fitting or len(chunks) - turn <= R - len(rows)):
            rows.append([q])
            room.append(S - len(chunks[q]))
            turns.append(turn)
        elif fitting:
            row = min(fitting, key=lambda row: (room[row], -turns[row]))
            rows[row].append(q)
            room[row] -= len(chunks[q])
            turns[row] = turn
        else:
            put_off.append(chunks[q])
    return [[chunks[q] for q in sorted(row)] for row in rows] + [[] for _ in range(R - len(rows))], put_off


# ----------------------------------------------------- ORDER.md 6. Slices and samples, and STATE.md 4. Another seq_len


@dataclass(frozen=True)
class Cut:
    """How a corpus is cut into samples: S, an origin o of each part, a base b in each stream.

    The samples of part p with numbers below `joined[p]` have the samples [first[p], stop[p]) of the cut before.
    """

    S: int
    origins: tuple[int, ...]
    bases: tuple[int, ...]
    joined: tuple[int, ...]
    first: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    before: Cut | None = None
    left_out: int = 0

    @classmethod
    def of_start(cls, corpus: Corpus, S: int) -> Cut:
        return cls(S, (0,) * len(corpus.parts), (0,) * corpus.C, (0,) * len(corpus.parts))


def sample_of_part(corpus: Corpus, cut: Cut, c: int, k: int) -> tuple[Part, int]:
    """Which sample of which part is sample k of a corpus in stream c."""
    since = k - cut.bases[c]
    return (corpus.parts[c], since) if corpus.is_dealt else (corpus.parts[0], since * corpus.C + c)


def slice_of(part: Part, cut: Cut, number: int) -> int:
    """The slice that a sample of a part reads."""
    o, S = cut.origins[part.p], cut.S
    window = part.window_at(o + number * S)
    first = ceil_div(max(window.start, o) - o, S)
    inside = max(0, (window.stop - o) // S - first)
    if number - first >= inside:
        return number
    return first + perm(inside, part.key("samples", window.epoch, window.number))(number - first)


def sample_pieces(corpus: Corpus, cut: Cut, p: int, number: int, epochs: float | None) -> list[range]:
    """The tokens of the corpus that a sample of part p has, piece after piece."""
    part = corpus.of_length(cut.S).parts[p]
    if number < cut.joined[p]:
        assert cut.before is not None
        m = cut.S // cut.before.S
        first = cut.first[p] + number * m
        old = range(first, min(first + m, cut.stop[p]))
        return [piece for each in old for piece in sample_pieces(corpus, cut.before, p, each, epochs)]
    start = cut.origins[p] + slice_of(part, cut, number) * cut.S
    stop = start + cut.S
    return part.read(start, stop if epochs is None else min(stop, floor(Fraction(epochs) * part.H)))


def changed(corpus: Corpus, cut: Cut, counts: Sequence[int], S: int) -> Cut:
    """The cut from a change to S on, after `counts` samples in each stream."""
    origins, all_joined, firsts, stops, left_out = [], [], [], [], cut.left_out
    m = S // cut.S if S % cut.S == 0 else 0
    for part, new in zip(corpus.of_length(cut.S).parts, corpus.of_length(S).parts, strict=True):
        o = cut.origins[part.p]
        streams = [part.p] if corpus.is_dealt else range(corpus.C)
        last = [sample_of_part(corpus, cut, c, counts[c] - 1)[1] for c in streams if counts[c] > cut.bases[c]]
        u = max(last, default=-1) + 1
        if u <= cut.joined[part.p]:
            f = cut.joined[part.p]
        else:
            f = ceil_div(part.window_at(o + (u - 1) * cut.S).stop - o, cut.S)
        joined = ceil_div(f - u, m) if m else 0
        origin = o + cut.S * f
        origins.append(origin + origin // part.H * (new.H - part.H) - joined * S)
        left_out += (u - sum(counts[c] - cut.bases[c] for c in streams) + (0 if m else f - u)) * cut.S
        all_joined.append(joined)
        firsts.append(u)
        stops.append(f)
    lists = map(tuple, (origins, counts, all_joined, firsts, stops))
    return Cut(S, *lists, before=cut, left_out=left_out)


# ------------------------------------------------------------------------------------------ ORDER.md 7. The mixture

Segment = tuple[int, tuple[float, ...]]  # the global sample where it starts, its weights


@lru_cache(maxsize=10_000)
def share(weights: tuple[float, ...], a: int, h: int, b: int) -> int:
    """S of the node of the corpora [a, b) with the halves [a, h) and [h, b)."""
    node = sum(map(Fraction, weights[a:b]))
    return floor(WORD * sum(map(Fraction, weights[a:h])) / node) if node else 0


def divided(
    weights: tuple[float, ...], r: Sequence[int], n: int, a: int = 0, b: int | None = None, v: int = 0
) -> tuple[list[int], list[int]]:
    """Of the first n samples of node v in a segment: those of each corpus, and the remainders after them."""
    b = len(weights) if b is None else b
    if b - a == 1:
        return [n], []
    h = (a + b) // 2
    total = r[v] + n * share(weights, a, h, b)
    left, left_r = divided(weights, r, total // WORD, a, h, v + 1)
    right, right_r = divided(weights, r, n - total // WORD, h, b, v + (h - a))
    return left + right, [total % WORD, *left_r, *right_r]


@dataclass(frozen=True)
class Mixture:
    """Segments, and of each stream the counts of each corpus and the remainders of each node at the first of them."""

    C: int
    segments: tuple[Segment, ...]
    counts: tuple[tuple[int, ...], ...]
    remainders: tuple[tuple[int, ...], ...]

    @classmethod
    def of_start(cls, seed: int, C: int, segments: Sequence[Segment], counts: Any = None) -> Mixture:
        K = len(segments[0][1])
        phases = [perm(C, Key("phases", seed, window=v)) for v in range(K - 1)]
        remainders = tuple(tuple((2 * phase(c) + 1) * WORD // (2 * C) for phase in phases) for c in range(C))
        return cls(C, tuple(segments), counts or ((0,) * K,) * C, remainders)

    def own(self, g: int, c: int) -> int:
        """Samples of stream c before the global sample g."""
        return ceil_div(g - c, self.C)

    def at(self, c: int, n: int) -> tuple[list[int], list[int]]:
        """Counts and remainders of stream c before its sample n."""
        counts, r = list(self.counts[c]), list(self.remainders[c])
        starts = [self.own(start, c) for start, _ in self.segments] + [n]
        for (_, weights), (start, stop) in zip(self.segments, pairwise(starts), strict=True):
            if start < (stop := min(stop, n)):
                given, r = divided(weights, r, stop - start)
                counts = [before + more for before, more in zip(counts, given, strict=True)]
        return counts, r

    def counts_before(self, g: int) -> list[list[int]]:
        """Of each stream, the samples of each corpus before the global sample g."""
        return [self.at(c, self.own(g, c))[0] for c in range(self.C)]

    def located(self, g: int) -> tuple[int, int]:
        """The corpus of a global sample, and which sample of it in its stream it is."""
        n, c = divmod(g, self.C)
        before, after = self.at(c, n)[0], self.at(c, n + 1)[0]
        index = next(i for i in range(len(before)) if after[i] > before[i])
        return index, before[index]

    def compacted(self, g: int) -> Mixture:
        """The same from the first of the last 16 segments on that start at g or before (STATE.md 2, `weights`)."""
        index = max(0, sum(start <= g for start, _ in self.segments) - 16)
        start = self.segments[index][0]
        found = [self.at(c, self.own(start, c)) for c in range(self.C)]
        counts, remainders = (tuple(tuple(pair[i]) for pair in found) for i in (0, 1))
        return Mixture(self.C, self.segments[index:], counts, remainders)


# ------------------------------------------------------------------------ ROWS.md 1. Tokens and labels, 3. Transforms


@dataclass
class Sample:
    """Tokens of a sample without padding, the lengths of its pieces, the next token of each piece, `loss_weights`."""

    tokens: list[int]
    lengths: list[int]
    nexts: list[int]
    weights: list[float] | None = None

    def pieces(self) -> Iterator[tuple[list[int], int, list[float]]]:
        """Tokens, next token and weights of each piece; without loss spans no weights."""
        stops = list(accumulate(self.lengths, initial=0))
        for (start, stop), following in zip(pairwise(stops), self.nexts, strict=True):
            yield self.tokens[start:stop], following, (self.weights or [])[start:stop]


@dataclass
class Row:
    input_ids: list[int]
    labels: list[int]
    position_ids: list[int]
    lengths: list[int]
    corpus: int
    sample: int
    loss_weights: list[float] | None = None


class Random:
    """The words of the transforms of a global sample."""

    def __init__(self, seed: int, g: int) -> None:
        self.key, self.drawn = Key("transform", seed, window=g), 0

    def word(self) -> int:
        self.drawn += 1
        return word_hash(self.key, self.drawn - 1)

    def integer(self, below: int) -> int:
        return ((self.word() >> 32) * below) >> 32


def as_row(sample: Sample, S: int, corpus: int, g: int) -> Row:
    """Labels and positions are made from pieces; what the row lacks is filled with a piece of padding."""
    missing = S - len(sample.tokens)
    labels = [label for piece, following, _ in sample.pieces() for label in [*piece[1:], following]]
    labels += [NO_LABEL] * missing
    weights = None if sample.weights is None else sample.weights + [0.0] * missing
    if weights is not None:
        labels = [label if weight else NO_LABEL for label, weight in zip(labels, weights, strict=True)]
        weights = [weight if label != NO_LABEL else 0.0 for label, weight in zip(labels, weights, strict=True)]
    lengths = sample.lengths + [missing] * (missing > 0)
    positions = [i for length in lengths for i in range(length)]
    return Row(sample.tokens + [0] * missing, labels, positions, lengths, corpus, g, weights)


def as_batch(rows: Sequence[Row]) -> dict[str, Any]:
    lengths = [length for row in rows for length in row.lengths]
    ends = list(accumulate(lengths, initial=0))
    entries = max(64, 1 << (len(ends) - 1).bit_length())
    weights = [row.loss_weights for row in rows if row.loss_weights is not None]
    return ({"loss_weights": weights} if weights else {}) | {
        "input_ids": [row.input_ids for row in rows],
        "labels": [row.labels for row in rows],
        "position_ids": [row.position_ids for row in rows],
        "cu_seqlens": ends + ends[-1:] * (entries - len(ends)),
        "max_seqlen": max(lengths),
        "corpus_index": [row.corpus for row in rows],
        "sample_index": [row.sample for row in rows],
    }


# ---------------------------------------------------------------------------------- ORDER.md 1. A plan and its defaults


class Plan:
    def __init__(
        self,
        corpora: Sequence[Used],
        *,
        seq_len: int,
        seed: int = 0,
        num_streams: int = 1,
        block_tokens: int | None = None,
        window_blocks: int | None = None,
        weights: Sequence[float] | None = None,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
        epochs: float | None = None,
        transforms: Sequence[Callable[[Sample, Random], Sample]] = (),
    ) -> None:
        self.used, self.S, self.seed, self.C = list(corpora), seq_len, seed, num_streams
        default = max(65_536, 16 * seq_len)
        if any(used.pack == "whole" for used in corpora):
            default = ceil_div(1_048_576, 128 * seq_len) * 128 * seq_len
        self.B = block_tokens or default
        self.changes: list[Segment] = [(start, tuple(map(float, values))) for start, values in changes]
        # the tokens that are read do not depend on windows
        read = [float(Corpus(used, seed, self.C, self.B, 64, seq_len).tokens_read) for used in corpora]
        self.weights = read if weights is None else list(weights)
        share, y = max(Fraction(max(given)) / sum(map(Fraction, given)) for _, given in self.segments), 0
        while share <= Fraction(1, 2 ** (y + 1)):
            y += 1
        self.W = window_blocks or max(64, 67_108_864 // (2**y * self.B * self.C))
        self.corpora = [Corpus(used, seed, self.C, self.B, self.W, seq_len) for used in corpora]
        self.epochs, self.transforms = epochs, list(transforms)
        self.has_weights = any(used.documents.target_weights is not None for used in corpora)

    @property
    def segments(self) -> list[Segment]:
        return [(0, tuple(map(float, self.weights))), *self.changes]

    def segments_from(self, g: int) -> list[Segment]:
        """The weights that are in force at g as if they started there, and the changes after it."""
        in_force = [weights for start, weights in self.segments if start <= g][-1]
        return [(g, in_force), *self.changes_after(g)]

    def changes_after(self, g: int) -> list[Segment]:
        return [segment for segment in self.changes if segment[0] > g]

    @cached_property
    def start(self) -> Run:
        return Run(self)

    @property
    def num_samples(self) -> int | None:
        return self.start.end() if self.epochs is not None else None

    def located(self, g: int) -> tuple[int, int]:
        return self.start.mixture.located(g)

    def pieces(self, g: int) -> list[tuple[int, int, int]]:
        return self.start.pieces(g)

    def row(self, g: int) -> Row:
        return self.start.row(g)


# ------------------------------------------------------------------------- ORDER.md 8 and 9. A run: ends, steps, ranks


class Run:
    """A job: a cursor in a plan, and what was done to the order on the way."""

    def __init__(self, plan: Plan, max_epochs: Sequence[float | None] | None = None) -> None:
        self.plan = plan
        self.max_epochs = [plan.epochs] if plan.epochs is not None else max_epochs or [None] * len(plan.corpora)
        self.masks: list[dict[str, Any]] = []
        self.begin()

    def begin(self) -> None:
        """The start of a pass, the first or, if one of `epochs` is over, the next: only masks stay."""
        plan = self.plan
        self.sample, self.first_seq_len = 0, plan.S
        self.mixture = Mixture.of_start(plan.seed, plan.C, plan.segments)
        self.cuts = [Cut.of_start(corpus, plan.S) for corpus in plan.corpora]
        self.skipped: list[list[int]] = []
        self.changes: list[dict[str, Any]] = []
        self.lengths: list[dict[str, Any]] = []
        self.masks = [{**mask, "calls": [[0, mask["calls"][-1][1]]]} for mask in self.masks]

    def end(self) -> int | None:
        """X: the first global sample from the cursor on that is another one than `max_epochs` allows."""
        return min((end for end in self.ends() if end is not None), default=None)

    def ends(self) -> list[int | None]:
        """X of each corpus."""
        streams, limits = range(self.plan.C), list(enumerate(self.max_epochs))
        found = [[self.first_beyond(index, most, c) for c in streams if most is not None] for index, most in limits]
        return [min((end for end in each if end is not None), default=None) for each in found]

    def first_beyond(self, index: int, most: float, c: int) -> int | None:
        """X of one corpus in one stream."""
        corpus, cut, mixture = self.plan.corpora[index], self.cuts[index], self.mixture
        part, number = sample_of_part(corpus, cut, c, cut.bases[c])
        allowed = ceil((Fraction(most) * part.H - cut.origins[part.p]) / cut.S)
        beyond = max(0, ceil_div(allowed - number, 1 if corpus.is_dealt else corpus.C))
        low, high = mixture.own(self.sample, c), mixture.own(2**62 + 1, c)
        k = max(cut.bases[c] + beyond, mixture.at(c, low)[0][index])
        if mixture.at(c, high)[0][index] <= k:
            return None
        while high - low > 1:  # before sample `low` of the stream the corpus gave at most k, before `high` more
            middle = (low + high) // 2
            low, high = (low, middle) if mixture.at(c, middle)[0][index] > k else (middle, high)
        return low * corpus.C + c

    def read(self, g: int) -> tuple[int, list[range]]:
        """The corpus of a global sample, and its pieces as tokens of the corpus."""
        index, k = self.mixture.located(g)
        corpus, cut = self.plan.corpora[index], self.cuts[index]
        part, number = sample_of_part(corpus, cut, g % corpus.C, k)
        return index, sample_pieces(corpus, cut, part.p, number, self.plan.epochs)

    def pieces(self, g: int) -> list[tuple[int, int, int]]:
        """As documents, and tokens [start, stop) of each."""
        index, found = self.read(g)
        documents = self.plan.used[index].documents
        numbers = [documents.number_at(piece.start) for piece in found]
        starts = [documents.starts[n] for n in numbers]
        return [(n, p.start - at, p.stop - at) for n, p, at in zip(numbers, found, starts, strict=True)]

    def row(self, g: int) -> Row:
        index, found = self.read(g)
        documents = self.plan.used[index].documents
        tokens, lengths = [documents.token(at) for piece in found for at in piece], [len(piece) for piece in found]
        weights = [weight for piece in found for weight in documents.label_weights(piece)]
        sample = Sample(
            tokens, lengths, list(map(documents.next_token, found)), weights if self.plan.has_weights else None
        )
        random = Random(self.plan.seed, g)
        for transform in self.plan.transforms:
            sample = transform(sample, random)
        row = as_row(sample, self.plan.S, index, g)
        masked = self.masked(documents.content, g)  # ROWS.md 2
        places = [documents.number_at(at) in masked for piece in found for at in piece]
        row.labels[: len(places)] = [NO_LABEL if m else label for m, label in zip(places, row.labels, strict=False)]
        if row.loss_weights is not None:
            weights = zip(row.labels, row.loss_weights, strict=True)
            row.loss_weights = [0.0 if label == NO_LABEL else weight for label, weight in weights]
        return row

    def masked(self, content: bytes, g: int) -> set[int]:
        """The documents of a content that are masked in a global sample."""
        found: set[int] = set()
        for mask in self.masks:
            sizes = [size for start, size in mask["calls"] if start <= g]
            if sizes and mask["fingerprint"] == content.hex():
                found |= documents_listed(content_of(mask["file"])[: sizes[-1]])
        return found

    def step(self, Z: int, r: int = 0, R: int = 1) -> dict[str, Any] | None:
        """The batch of rank r of R, or None if the pass is over. The cursor moves on."""
        C, a, S = self.plan.C, self.sample, self.plan.S
        end = self.end()
        if end is not None and a >= end:
            return None
        z, n = Z // C, ceil_div(Z, R)
        samples = [a + (i // z - a) % C + (i % z) * C for i in range(Z)]
        part = r if C > 1 else (r + mix(a * G % WORD)) % R
        mine = samples[part * n : (part + 1) * n]
        rows = [self.row(g) for g in mine if end is None or g < end]
        rows += [as_row(Sample([], [], [], [] if self.plan.has_weights else None), S, -1, -1)] * (n - len(rows))
        self.sample = a + Z if end is None else min(a + Z, end)
        return as_batch(rows)

    # what a loop does between steps

    def set_weights(self, weights: Sequence[float]) -> None:
        before = [segment for segment in self.mixture.segments if segment[0] < self.sample]
        segments = (*before, (self.sample, tuple(map(float, weights))))
        self.mixture = replace(self.mixture, segments=segments)

    def skip(self, num_samples: int) -> None:
        end = self.end() if self.plan.epochs is not None else None
        start = self.sample
        self.sample = start + num_samples if end is None else min(start + num_samples, end)
        if self.skipped and self.skipped[-1][1] == start:
            self.skipped[-1] = [self.skipped[-1][0], self.sample]
        elif start < self.sample:
            self.skipped.append([start, self.sample])

    def mask(self, index: int, file: str) -> None:
        """ROWS.md 2, and `masks` of STATE.md 2."""
        used, content = self.plan.used[index], content_of(file)
        key, sha256 = used.documents.content.hex(), hashlib.sha256(content).hexdigest()
        same = [mask for mask in self.masks if mask["fingerprint"] == key]
        if any((mask["calls"][-1][1], mask["sha256"]) == (len(content), sha256) for mask in same):
            return
        calls: list[list[int]] = []
        for mask in [mask for mask in same if mask["file"] == file]:  # one at most
            calls = [call for call in mask["calls"] if call[0] < self.sample]
            self.masks = [other for other in self.masks if other is not mask]
        calls = [*calls, [self.sample, len(content)]]
        self.masks = [
            *self.masks,
            {"fingerprint": key, "name": used.name, "file": file, "calls": calls, "sha256": sha256},
        ]


def content_of(file: str) -> bytes:
    return Path(file).read_bytes()


@lru_cache(maxsize=100)
def documents_listed(content: bytes) -> frozenset[int]:
    return frozenset(map(int, content.split()))
