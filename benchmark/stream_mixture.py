"""How far the corpora of C streams are from their exact shares, in samples.

    python -m benchmark.stream_mixture [--streams 8 64 256] [--corpora 2 5 20 100]

Worst of three kinds of weights and some positions up to a million rounds. *One stream* counts one of them alone; the
others all streams together: after whole rounds of C samples, at any sample, after 1,000 small changes of weights (an
anneal) and after 200 changes to any weights. Seeds are fixed: it gives the same table anywhere.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmark.processes import ROOT
from benchmark.report import commit, markdown, versions
from tokshard.runtime.order.mixture import Mixture, Segment, samples_before

NUM_ROUNDS = 10**6
HEAD = ("streams", "corpora", "one stream", "whole rounds", "any sample", "1,000 small changes", "200 changes")

Shares = list[Fraction]


def shares_of(segments: Sequence[Segment], sample: int) -> Shares:
    """Exact samples of each corpus before a sample."""
    stops = [*(segment.start for segment in segments[1:]), sample]
    exact = [Fraction(0)] * len(segments[0].weights)
    for segment, stop in zip(segments, stops, strict=True):
        total = sum(map(Fraction, segment.weights))
        length = max(0, min(stop, sample) - segment.start)
        exact = [
            known + length * Fraction(weight) / total for known, weight in zip(exact, segment.weights, strict=True)
        ]
    return exact


def distance(counts: Sequence[int], exact: Shares) -> float:
    """Of the corpus that is furthest off."""
    return max(abs(float(count - share)) for count, share in zip(counts, exact, strict=True))


def together(num_streams: int, segments: Sequence[Segment], samples: Sequence[int], seed: int) -> float:
    """The worst distance of all streams together, at some global samples."""
    mixtures = Mixture(seed=seed, num_streams=num_streams, segments=tuple(segments))
    return max(distance(mixtures.counts_before(sample), shares_of(segments, sample)) for sample in samples)


def alone(num_streams: int, weights: Sequence[float], samples: Sequence[int], seed: int) -> float:
    """The worst distance of one stream."""
    segment = Segment(start=0, weights=tuple(weights))
    mixtures = Mixture(seed=seed, num_streams=num_streams, segments=(segment,))
    return max(
        distance(counts, shares_of([segment], samples_before(sample, stream, num_streams)))
        for sample in samples
        for stream, counts in enumerate(mixtures.balance_before(sample).counts.T.tolist())
    )


def weights_of(num_corpora: int) -> list[list[float]]:
    rng = np.random.default_rng(num_corpora)
    one_large = [9.0, *[1.0 / num_corpora] * (num_corpora - 1)]
    return [[1.0] * num_corpora, rng.pareto(1.0, num_corpora).tolist(), one_large]


def changes(weights: Sequence[NDArray[np.float64]], steps: NDArray[np.int64]) -> list[Segment]:
    starts = [0, *np.cumsum(steps).tolist()]
    return [Segment(start=start, weights=tuple(one.tolist())) for start, one in zip(starts, weights, strict=False)]


def figures(num_streams: int, num_corpora: int, num_positions: int) -> list[float]:
    """The row of a table."""
    rng = np.random.default_rng(num_streams + num_corpora)
    rounds = np.exp(rng.uniform(0, np.log(NUM_ROUNDS), num_positions)).astype(np.int64) * num_streams
    anywhere = rounds + rng.integers(0, num_streams, num_positions)
    kinds = [Segment(start=0, weights=tuple(weights)) for weights in weights_of(num_corpora)]
    first, last = (np.array(kind.weights) / sum(kind.weights) for kind in kinds[1:])
    small = [first + (last - first) * part for part in np.linspace(0, 1, 1_000)]
    arbitrary = [rng.pareto(1.0, num_corpora) for _ in range(200)]
    changed = [changes(weights, num_streams * rng.integers(1, 50, len(weights))) for weights in (small, arbitrary)]
    return [
        max(alone(num_streams, kind.weights, rounds.tolist(), seed) for seed, kind in enumerate(kinds)),
        max(together(num_streams, [kind], rounds.tolist(), seed) for seed, kind in enumerate(kinds)),
        max(together(num_streams, [kind], anywhere.tolist(), seed) for seed, kind in enumerate(kinds)),
        *(
            max(
                together(num_streams, segments[: number + 1], [later.start], 0)
                for number, (_, later) in enumerate(pairwise(segments))
                if number % (len(segments) // 4) == len(segments) // 4 - 1
            )
            for segments in changed
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--corpora", type=int, nargs="+", default=[2, 5, 20, 100])
    parser.add_argument("--positions", type=int, default=20)
    arguments = parser.parse_args()
    rows = [
        (streams, corpora, figures(streams, corpora, arguments.positions))
        for streams in arguments.streams
        for corpora in arguments.corpora
    ]
    cells = [[str(streams), str(corpora), *(f"{value:.1f}" for value in found)] for streams, corpora, found in rows]
    line = {"benchmark": "stream_mixture", "commit": commit(ROOT), "versions": versions(("tokshard", "numpy"))}
    line["figures"] = [{"streams": streams, "corpora": corpora, "worst": found} for streams, corpora, found in rows]
    sys.stdout.write(markdown([HEAD, *cells], num_left=0) + "\n\n" + json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
