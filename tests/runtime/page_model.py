"""The order of training data, written from ORDER.md alone: without the code, without its libraries, and slowly.

Numbers of sections are those of the page, but for transforms, which STATE.md has. Names are its names where it has
some. Where a change of this model needs a look at the code, the page lacks a sentence.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import ceil, floor
from typing import Any, NamedTuple

ORDER_VERSION = 1
WORD = 1 << 64
G = 0x9E3779B97F4A7C15
NO_LABEL = -100


# 1. Notation


def mix(x: int) -> int:
    x %= WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# 2. Keys


class Key(NamedTuple):
    purpose: str
    seed: int = 0
    content: bytes = bytes(32)
    stream: int = 0
    epoch: int = 0
    window: int = 0

    def word(self, number: int) -> int:
        return self.eight_words(number // 8)[number % 8]

    @lru_cache(maxsize=4096)  # noqa: B019 (a key is a value)
    def eight_words(self, i: int) -> tuple[int, ...]:
        hashed = ORDER_VERSION.to_bytes(4, "little") + self.purpose.encode("ascii").ljust(16, b"\0")
        hashed += self.seed.to_bytes(8, "little") + self.content
        hashed += b"".join(number.to_bytes(8, "little") for number in (self.stream, self.epoch, self.window))
        hashed += i.to_bytes(4, "little")
        assert len(hashed) == 88
        digest = hashlib.blake2b(hashed, digest_size=64).digest()
        return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8))


# 3. Permutations


def item_hash(x: int, key: Key) -> int:
    h = (x + key.word(0)) * G
    h = mix(h) + key.word(1)
    return (mix(h) + key.word(2)) % WORD


@lru_cache(maxsize=1024)
def sorted_items(n: int, key: Key) -> list[int]:
    return sorted(range(n), key=lambda x: (item_hash(x, key), x))


def perm(n: int, key: Key) -> Callable[[int], int]:
    if n <= 65_536:
        return sorted_items(n, key).__getitem__
    b = (n - 1).bit_length()
    k = key.eight_words(0) + key.eight_words(1)
    rounds = [(k[r] | 1, k[8 + r] | 1) for r in range(8)]
    mask, shift = (1 << b) - 1, (b + 1) // 2

    def item(x: int) -> int:
        while True:
            for factor, summand in rounds:
                x = (x * factor + summand) & mask
                x ^= x >> shift
            if x < n:
                return x

    return item


# 4 to 6. One corpus


class Documents(NamedTuple):
    """A corpus as it is stored."""

    content: bytes  # its fingerprint
    starts: Sequence[int]  # of the documents, ascending
    num_tokens: int  # T
    token: Callable[[int], int]  # from a position to the token's id

    @classmethod
    def of_lengths(cls, content: bytes, lengths: Sequence[int], token: Callable[[int], int]) -> "Documents":
        ends = list(accumulate(lengths))
        return cls(content, [0, *ends[:-1]], ends[-1], token)

    def document(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1

    def end(self, document: int) -> int:
        return self.starts[document + 1] if document + 1 < len(self.starts) else self.num_tokens

    def is_delimiter(self, position: int) -> bool:
        return position + 1 == self.end(self.document(position))


Piece = tuple[int, int]  # positions in the corpus, the last one excluded


class Corpus:
    """What a stream owns of a corpus; of a whole one, stream 0 of 1."""

    def __init__(
        self,
        documents: Documents,
        *,
        seed: int,
        seq_len: int,
        block_tokens: int,
        window_blocks: int,
        take: float = 1.0,
        start_epoch: int = 0,
        stream: int = 0,
        parts: int = 1,
    ) -> None:
        self.documents = documents
        self.seed = seed
        self.S = seq_len
        self.B = block_tokens
        self.W = window_blocks
        self.start_epoch = start_epoch
        self.stream = stream
        self.parts = parts
        self.F = documents.num_tokens // self.B
        self.taken = floor(Fraction(take) * self.F + Fraction(1, 2))
        self.M = ceil_div(self.taken - stream, parts)
        self.has_tail = take == 1 and stream == parts - 1
        self.N = self.M * self.B + (documents.num_tokens - self.F * self.B if self.has_tail else 0)
        assert self.N > 0
        self.windows = max(1, ceil_div(self.M, self.W))

    def key(self, purpose: str, epoch: int, window: int = 0) -> Key:
        return Key(purpose, self.seed, self.documents.content, self.stream, epoch + self.start_epoch, window)

    def block(self, epoch: int, place: int) -> Piece:
        j = perm(self.M, self.key("blocks", epoch))(place)
        j = perm(self.F, Key("deal", content=self.documents.content))(j * self.parts + self.stream)
        return j * self.B, (j + 1) * self.B

    def bounds(self, epoch: int, window: int) -> tuple[int, int]:
        """The positions of the sequence that a window covers."""
        start = epoch * self.N + window * self.W * self.B
        last = window == self.windows - 1
        return start, (epoch + 1) * self.N if last else start + self.W * self.B

    def window_at(self, position: int) -> tuple[int, int]:
        epoch, within = divmod(position, self.N)
        return epoch, min(within // (self.W * self.B), self.windows - 1)

    @lru_cache(maxsize=64)  # noqa: B019 (few corpora, and short tests)
    def pieces(self, epoch: int, window: int) -> list[Piece]:
        """Those of a window, in the order of the sequence."""
        places = range(window * self.W, min((window + 1) * self.W, self.M))
        blocks = [self.block(epoch, place) for place in places]
        if self.has_tail and window == self.windows - 1 and self.documents.num_tokens > self.F * self.B:
            blocks.append((self.F * self.B, self.documents.num_tokens))
        cut = []
        for begin, end in blocks:
            at = begin
            document = self.documents.document(at)
            while at < end:
                until = min(self.documents.end(document), end)
                cut.append((at, until))
                at = until
                document += 1
        shuffled = perm(len(cut), self.key("pieces", epoch, window))
        return [cut[shuffled(q)] for q in range(len(cut))]

    def read(self, start: int, stop: int) -> Iterator[Piece]:
        """The positions [start, stop) of the sequence, as pieces, of which the first and the last may be cut."""
        while start < stop:
            at, window_stop = self.bounds(*self.window_at(start))
            for begin, end in self.pieces(*self.window_at(start)):
                low, high = max(start, at), min(stop, at + end - begin)
                if low < high:
                    yield begin + low - at, begin + high - at
                at += end - begin
            assert at == window_stop
            start = window_stop

    def slice_of(self, sample: int) -> int:
        epoch, window = self.window_at(sample * self.S)
        start, stop = self.bounds(epoch, window)
        first = ceil_div(start, self.S)
        inside = max(0, stop // self.S - first)
        i = sample - first
        return first + perm(inside, self.key("samples", epoch, window))(i) if i < inside else sample


# 7. The mixture


class Node(NamedTuple):
    number: int
    a: int
    h: int
    b: int


class Mixture:
    def __init__(
        self, seed: int, segments: Sequence[tuple[int, Sequence[float]]], stream: int = 0, streams: int = 1
    ) -> None:
        # (first sample of the stream, weights), the first from 0; with one stream its samples are the global ones
        self.segments = [(ceil_div(start - stream, streams), weights) for start, weights in segments]
        self.stream = stream
        self.streams = streams
        self.seed = seed
        self.corpora = len(segments[0][1])
        self.nodes: dict[tuple[int, int], Node] = {}
        self.number_nodes(0, self.corpora)

    def number_nodes(self, a: int, b: int) -> None:
        if b - a > 1:
            h = (a + b) // 2
            self.nodes[a, b] = Node(len(self.nodes), a, h, b)
            self.number_nodes(a, h)
            self.number_nodes(h, b)

    def first_remainder(self, node: int) -> int:
        p = perm(self.streams, Key("phases", self.seed, window=node))(self.stream)
        return (2 * p + 1) * WORD // (2 * self.streams)

    def locate(self, g: int) -> tuple[int, int]:
        """The corpus of a sample of the stream, and which sample of it that is."""
        counts = [0] * self.corpora
        remainders = [self.first_remainder(node) for node in range(len(self.nodes))]
        starts = [start for start, _ in self.segments]
        number = bisect_right(starts, g) - 1
        for at in range(number):
            segment = Segment(self, self.segments[at][1], counts, remainders)
            counts, remainders = segment.ended(starts[at + 1] - starts[at])
        corpus, n = Segment(self, self.segments[number][1], counts, remainders).locate(g - starts[number])
        return corpus, counts[corpus] + n


class Segment:
    def __init__(self, mixture: Mixture, weights: Sequence[float], counts: list[int], remainders: list[int]) -> None:
        self.mixture = mixture
        self.weights = [Fraction(weight) for weight in weights]
        self.counts = counts
        self.remainders = remainders

    def share(self, node: Node) -> int:
        of_all = sum(self.weights[node.a : node.b])
        return floor(WORD * sum(self.weights[node.a : node.h]) / of_all) if of_all else 0

    def left(self, node: Node, n: int) -> int:
        """How many of the first n samples of a node its left half gets: L(n)."""
        return (self.remainders[node.number] + n * self.share(node)) // WORD

    def locate(self, n: int) -> tuple[int, int]:
        a, b = 0, self.mixture.corpora
        while b - a > 1:
            node = self.mixture.nodes[a, b]
            left = self.left(node, n)
            if self.left(node, n + 1) > left:
                b, n = node.h, left
            else:
                a, n = node.h, n - left
        return a, n

    def ended(self, n: int) -> tuple[list[int], list[int]]:
        """Counts and remainders after n samples."""
        counts, remainders = list(self.counts), list(self.remainders)

        def give(a: int, b: int, n: int) -> None:
            if b - a == 1:
                counts[a] += n
                return
            node = self.mixture.nodes[a, b]
            left = self.left(node, n)
            remainders[node.number] = (remainders[node.number] + n * self.share(node)) % WORD
            give(a, node.h, left)
            give(node.h, b, n - left)

        give(0, self.mixture.corpora, n)
        return counts, remainders


# 8 and 9. Samples and rows


class Row(NamedTuple):
    input_ids: list[int]
    labels: list[int]
    position_ids: list[int]
    lengths: list[int]  # of the pieces, and of the padding if there is any


class Used(NamedTuple):
    """A corpus and how a plan uses it."""

    documents: Documents
    take: float = 1.0
    start_epoch: int = 0


class Plan:
    def __init__(
        self,
        corpora: Sequence[Used],
        *,
        seq_len: int,
        seed: int = 0,
        block_tokens: int | None = None,
        window_blocks: int | None = None,
        weights: Sequence[float] | None = None,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
        epochs: int | None = None,
        num_streams: int = 1,
        transforms: Sequence["FillInTheMiddle"] = (),
    ) -> None:
        block_tokens = max(65_536, 16 * seq_len) if block_tokens is None else block_tokens
        window_blocks = max(64, 67_108_864 // (block_tokens * num_streams)) if window_blocks is None else window_blocks
        self.S = seq_len
        self.seed = seed
        self.C = num_streams
        self.B = block_tokens
        self.W = window_blocks
        self.used = corpora
        self.transforms = transforms
        self.corpora = [
            Corpus(
                used.documents,
                seed=seed,
                seq_len=seq_len,
                block_tokens=block_tokens,
                window_blocks=window_blocks,
                take=used.take,
                start_epoch=used.start_epoch,
            )
            for used in corpora
        ]
        weights = [float(corpus.N) for corpus in self.corpora] if weights is None else weights
        segments = [(0, weights), *changes]
        self.mixtures = [Mixture(seed, segments, stream, num_streams) for stream in range(num_streams)]
        self.end = None if epochs is None else epochs * self.corpora[0].N  # of the sequence of the only corpus

    @cached_property
    def num_samples(self) -> int | None:
        return None if self.end is None else ceil_div(self.end, self.S)

    def located(self, g: int) -> tuple[int, int]:
        """The corpus of a global sample, and which sample of it that is in its stream."""
        return self.mixtures[g % self.C].locate(g // self.C)

    @lru_cache(maxsize=256)  # noqa: B019 (few plans, and short tests)
    def part(self, number: int, stream: int) -> Corpus | None:
        """What a stream owns of a corpus (section 13); None if the corpus stays whole."""
        corpus, used = self.corpora[number], self.used[number]
        if self.C == 1 or 4 * self.C * self.W > corpus.M:
            return None
        return Corpus(
            used.documents,
            seed=self.seed,
            seq_len=self.S,
            block_tokens=self.B,
            window_blocks=self.W,
            take=used.take,
            start_epoch=used.start_epoch,
            stream=stream,
            parts=self.C,
        )

    def read(self, corpus: Corpus, start: int, stop: int) -> list[Piece]:
        return list(corpus.read(start, stop if self.end is None else min(stop, self.end)))

    def positions(self, g: int) -> tuple[Corpus, int, list[Piece]]:
        """The corpus of a sample, the position of its sequence where the sample starts, and what it reads."""
        number, sample = self.located(g)
        corpus = self.part(number, g % self.C)
        if corpus is None:
            corpus, sample = self.corpora[number], sample * self.C + g % self.C
        start = corpus.slice_of(sample) * self.S
        return corpus, start, self.read(corpus, start, start + self.S)

    def pieces(self, g: int) -> list[tuple[int, int, int]]:
        """(document, its first token, the one after its last) of each piece of a sample."""
        corpus, _, pieces = self.positions(g)
        documents = corpus.documents
        found = []
        for begin, end in pieces:
            document = documents.document(begin)
            found.append((document, begin - documents.starts[document], end - documents.starts[document]))
        return found

    def row(self, g: int) -> Row:
        corpus, _, pieces = self.positions(g)
        documents = corpus.documents
        row = Row([], [], [], [])
        for begin, end in pieces:
            row.lengths.append(end - begin)
            for position in range(begin, end):
                row.input_ids.append(documents.token(position))
                row.position_ids.append(position - begin)
                if not documents.is_delimiter(position):
                    row.labels.append(documents.token(position + 1))
                else:
                    row.labels.append(NO_LABEL)
        lacking = self.S - len(row.input_ids)
        if lacking:
            row.lengths.append(lacking)
            row.input_ids.extend([0] * lacking)
            row.labels.extend([NO_LABEL] * lacking)
            row.position_ids.extend(range(lacking))
        return transformed(row, lacking, Random(self.seed, g), self.transforms) if self.transforms else row

    def batch(self, samples: Sequence[int]) -> dict[str, Any]:
        """Rows one after the other; -1 is a row of padding."""
        rows = [self.row(g) if g >= 0 else padding_row(self.S) for g in samples]
        lengths = [length for row in rows for length in row.lengths]
        bounds = [0, *accumulate(lengths)]
        size = 64
        while size < len(bounds):
            size *= 2
        return {
            "input_ids": [row.input_ids for row in rows],
            "labels": [row.labels for row in rows],
            "position_ids": [row.position_ids for row in rows],
            "cu_seqlens": bounds + [bounds[-1]] * (size - len(bounds)),
            "max_seqlen": max(lengths),
            "corpus_index": [self.located(g)[0] if g >= 0 else -1 for g in samples],
            "sample_index": list(samples),
        }

    def steps(self, batch_size: int, rank: int, ranks: int, max_epochs: Sequence[float] | None = None) -> Iterator[Any]:
        """The batches of a rank (sections 9, 10 and 13)."""
        rows = ceil_div(batch_size, ranks)
        ends = [] if self.num_samples is None else [self.num_samples]
        if max_epochs is not None:
            ends.append(self.first_beyond(max_epochs))
        cursor = 0
        while not ends or cursor < min(ends):
            step = sorted(range(cursor, cursor + batch_size), key=lambda g: (g % self.C, g))
            part = (rank + (mix(cursor * G) if self.C == 1 else 0)) % ranks
            mine = [step[row] if row < batch_size else -1 for row in range(part * rows, (part + 1) * rows)]
            yield self.batch([g if not ends or g < min(ends) else -1 for g in mine])
            cursor += batch_size

    def first_beyond(self, max_epochs: Sequence[float]) -> int:
        """The first sample that would read more of a corpus than `max_epochs` allows."""
        allowed = [ceil(Fraction(m) * corpus.N / self.S) for m, corpus in zip(max_epochs, self.corpora, strict=True)]
        g = 0
        while True:
            corpus, sample = self.located(g)
            if sample >= allowed[corpus]:
                return g
            g += 1


def padding_row(seq_len: int) -> Row:
    return Row([0] * seq_len, [NO_LABEL] * seq_len, list(range(seq_len)), [seq_len])


# 11. Transforms


class Random:
    """The numbers that all transforms of a sample draw."""

    def __init__(self, seed: int, g: int) -> None:
        self.key = Key("transform", seed, window=g)
        self.drawn = 0

    def word(self) -> int:
        self.drawn += 1
        return item_hash(self.drawn - 1, self.key)

    def uniform(self) -> float:
        return (self.word() >> 11) * 2.0**-53

    def integer(self, below: int) -> int:
        return ((self.word() >> 32) * below) >> 32


class FillInTheMiddle(NamedTuple):
    pre: int
    suf: int
    mid: int
    rate: float
    spm_rate: float

    def change(self, tokens: list[int], following: int, random: Random) -> tuple[list[int], int]:
        """One piece, and the label of its last token."""
        a, x, y, o = (random.uniform() for _ in range(4))
        c = len(tokens) - (following == NO_LABEL)
        if not (a < self.rate and c > 6):
            return tokens, following
        low, high = sorted([floor(x * (c - 2)), floor(y * (c - 2))])
        prefix, middle, suffix = tokens[:low], tokens[low:high], tokens[high + 3 : c]
        if o < self.spm_rate:
            changed = [self.pre, self.suf, *suffix, self.mid, *prefix, *middle]
        else:
            changed = [self.pre, *prefix, self.suf, *suffix, self.mid, *middle]
        return changed + tokens[c:], NO_LABEL


def transformed(row: Row, padding: int, random: Random, transforms: Sequence[FillInTheMiddle]) -> Row:
    """A row whose last `padding` tokens are padding, after transforms that leave pieces as long as they are."""
    lengths = row.lengths[:-1] if padding else row.lengths
    stops = list(accumulate(lengths))
    pieces = [
        (row.input_ids[stop - length : stop], row.labels[stop - 1]) for length, stop in zip(lengths, stops, strict=True)
    ]
    for transform in transforms:
        pieces = [transform.change(tokens, following, random) for tokens, following in pieces]
    ids = [token for tokens, _ in pieces for token in tokens]
    labels = [label for tokens, following in pieces for label in [*tokens[1:], following]]
    return row._replace(input_ids=ids + [0] * padding, labels=labels + [NO_LABEL] * padding)
