"""How well an order is shuffled: statistics whose mean and variance under a uniform permutation are known exactly.

Positions are 0 to n - 1, and so are items: `order[i]` is the item at position i, int64 [n]. Each statistic is a
z-score, (found - expected) / standard deviation, where both are those of a uniform permutation of n items, not of
independent draws: so its square has mean 1 for every n. `scores.py` puts those of many orders to the test.

Everything below that is a sum over pairs of positions rests on one formula. Let x be a number for each item, centred,
with S2 and S4 the sums of its squares and fourth powers; m pairs of positions; p the number of positions that two
pairs share; (n)_k = n (n-1) ... (n-k+1). The sum of x[a] * x[b] over the pairs has the mean -m S2 / (n)_2, and its
square the mean

    m (S2^2 - S4) / (n)_2  +  2p (2 S4 - S2^2) / (n)_3  +  (m^2 - m - 2p) (3 S2^2 - 6 S4) / (n)_4

since two pairs can be the same, share a position, or be apart.

References:
    Wald and Wolfowitz, Annals of Mathematical Statistics 14 (1943): serial correlation of a permutation. Dawson,
    American Statistician 8 (1954): chi-square of a table with given margins. Wilson and Hilferty, PNAS 17 (1931):
    chi-square as a normal score.
"""

from __future__ import annotations

from itertools import pairwise
from math import comb, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]
Floats = NDArray[np.float64]

NORMAL_FROM = 1000
"""Items from which a single z-score counts as normal, out to six standard deviations."""

NUM_BINS = 16
RARE_BIT = 16
"""A bit that fewer than one in so many items have is left out: its counts are not normal."""


# one order


def lags(num_items: int) -> list[int]:
    """Powers of two up to half the length."""
    return [1 << bit for bit in range(num_items.bit_length()) if 1 << bit <= num_items // 2]


def serial_correlation(order: Order) -> Floats:
    """Items that are a lag apart: the sum of x[i] x[i + L], x the centred item, and that of x[i] x[i xor L].

    Mean and variance by the formula above, with m = n - L and p = max(0, n - 2L) for the first; the second has disjoint
    pairs, p = 0.

    Returns:
        z [2 * lags].
    """
    num_items, items = len(order), _centred_items(order)
    index, found = np.arange(num_items), []
    for lag in lags(num_items):
        reach = num_items - lag
        products = items[:reach] * items[lag:]
        found.append(_pair_score(products.sum(), num_items, pairs=reach, shared=max(0, num_items - 2 * lag)))
        has_partner = (index[:reach] & lag) == 0
        products *= has_partner  # no BLAS: its threads spin for longer than this takes
        num_pairs = int(np.count_nonzero(has_partner))
        found.append(_pair_score(products.sum(), num_items, pairs=num_pairs, shared=0))
    return np.array(found)


def flipped_bits(order: Order) -> Floats:
    """In how many pairs of positions, i with i + L and i with i xor L, a bit of the item differs, for every bit.

    With a items that have the bit and b that lack it, m pairs and p as above: mean E = 2m ab / (n)_2, variance
    E + 2p ab / (n)_2 + (m^2 - m - 2p) 4 (a)_2 (b)_2 / (n)_4 - E^2. Multiplication modulo 2**k carries a flipped bit of
    the position upwards only, so that low bits of the item change always or never.

    Returns:
        z [2 * bits * lags].
    """
    num_items, index = len(order), np.arange(len(order))
    num_having = _bit_counts(index, np.zeros_like(index), num_items)[0]
    found = []
    for lag in lags(num_items):
        reach = num_items - lag
        has_partner = (~index[:reach] >> (lag.bit_length() - 1)) & 1
        other, partner = _bit_counts(order[lag:] ^ order[:reach], has_partner, num_items)
        shared = max(0, num_items - 2 * lag)
        num_pairs = int(np.count_nonzero(has_partner))
        found.append(_flip_scores(other + partner, num_items, num_having, pairs=reach, shared=shared))
        found.append(_flip_scores(partner, num_items, num_having, pairs=num_pairs, shared=0))
    return np.concatenate(found)


def distances(order: Order) -> Floats:
    """Distances of items that are a lag apart, (order[i + L] - order[i]) mod n, in 16 bins: chi-square.

    Each of 1 to n - 1 has the chance 1 / (n-1), and two of them are nearly independent: 15 degrees of freedom, up to
    terms of 1 / n. As a normal score. Items that stay next to each other, or keep any other distance, fill one bin.

    Returns:
        z [lags]; none under 1,000 items.
    """
    num_items = len(order)
    if num_items < NORMAL_FROM:
        return np.empty(0)
    return np.array([_binned(order[lag:] - order[:-lag], num_items) for lag in lags(num_items)])


def topic_mix(order: Order) -> Floats:
    """Topics per batch: a table of 16 stretches of the order by 16 stretches of the items, its chi-square.

    With N items and a table of r rows and c columns whose sums are given: mean N (r-1)(c-1) / (N-1), variance
    2N (v1-w1)(v2-w2) / (N-3) + N^2 w1 w2 / (N-1), where v = (r-1)(N-r) / (N-1), w = (N sum(1/R) - r^2) / (N-2) for the
    row sums R, and likewise for the columns.

    Returns:
        z [1]; none under 1,000 items.
    """
    if len(order) < NORMAL_FROM:
        return np.empty(0)
    return np.array([_table_score(_table(order, NUM_BINS, NUM_BINS))])


def topic_excess(order: Order, *, num_batches: int, num_topics: int) -> float:
    """Chi-square of topics per batch, divided by its mean: 1 for a uniform permutation, more where topics bunch."""
    table = _table(order, num_batches, num_topics)
    return _chi_square(table) / (len(order) * (num_batches - 1) * (num_topics - 1) / (len(order) - 1))


# two orders of the same items


def shifted_correlation(one: Order, other: Order) -> Floats:
    """One order against the other moved on by s, for every s from 0 to n - 1: the sum of x[i] y[(i + s) mod n].

    Mean 0, variance S2^2 / (n-1), x and y the centred items. Finds two readers that go the same way, one behind the
    other.

    Returns:
        z [n].
    """
    left, right = np.fft.rfft(_centred_items(one)), np.fft.rfft(_centred_items(other))
    found: Floats = np.fft.irfft(left.conj() * right, len(one)) / _correlation_scale(len(one))
    return found


# two ranks


def ranks_in_step(order: Order, *, global_batch_size: int) -> Floats:
    """What two ranks read in the same row of the same step: the sum of x[a] x[b] over these m disjoint pairs.

    Mean and variance by the formula above, p = 0.

    Returns:
        z [1].
    """
    half = global_batch_size // 2
    rows = _centred_items(order)[: len(order) // global_batch_size * global_batch_size].reshape(-1, 2, half)
    found = (rows[:, 0] * rows[:, 1]).sum()
    return np.array([_pair_score(found, len(order), pairs=len(rows) * half, shared=0)])


# places of one long document


def together(places: NDArray[np.int64], num_items: int) -> Floats:
    """Of K places among n, how many are followed by another at once: gaps of 1.

    With m = n - 1 pairs of places and p = n - 2: mean E = m (K)_2 / (n)_2, variance
    E + 2p (K)_3 / (n)_3 + (m^2 - m - 2p) (K)_4 / (n)_4 - E^2.

    Returns:
        z [1].
    """
    pairs, shared, size = num_items - 1, num_items - 2, len(places)
    chance = [_falling(size, k) / _falling(num_items, k) for k in (2, 3, 4)]
    mean = pairs * chance[0]
    variance = mean + 2 * shared * chance[1] + (pairs**2 - pairs - 2 * shared) * chance[2] - mean**2
    return np.array([(np.count_nonzero(np.diff(places) == 1) - mean) / sqrt(variance)])


def touched_steps(places: NDArray[np.int64], num_items: int, *, global_batch_size: int) -> Floats:
    """How many of the n / B steps hold one of K places.

    A step is missed with the chance q1 = C(n-B, K) / C(n, K), two with q2 = C(n-2B, K) / C(n, K): with s steps the mean
    is s (1 - q1), the variance s q1 + s (s-1) q2 - (s q1)^2.

    Returns:
        z [1].
    """
    size, steps = len(places), num_items // global_batch_size
    whole = comb(num_items, size)
    missed, both = (comb(num_items - k * global_batch_size, size) / whole for k in (1, 2))
    found = len(np.unique(places // global_batch_size)) - steps * (1 - missed)
    return np.array([found / sqrt(steps * missed + steps * (steps - 1) * both - (steps * missed) ** 2)])


# what statistics share


def chi_square_score(chi_square: float, freedom: float) -> float:
    """Chi-square as a normal score: its cube root is nearly normal."""
    return float((chi_square / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / sqrt(2 / (9 * freedom))


def ranked(values: NDArray[Any]) -> Order:
    """Distinct values as the permutation that they make."""
    order = np.empty(len(values), np.int64)
    order[np.argsort(values)] = np.arange(len(values))
    return order


def _falling(number: float, count: int) -> float:
    return prod(number - k for k in range(count))


def _centred_items(order: Order) -> Floats:
    """Items around 0, divided by n."""
    return np.asarray((order - (len(order) - 1) / 2) / len(order))


def _correlation_scale(num_items: int) -> float:
    """The standard deviation of the sum of x[i] y[i] over the positions of two orders: S2 / sqrt(n-1)."""
    return (num_items**2 - 1) / 12 / num_items / sqrt(num_items - 1)


def _bit_counts(values: Order, flags: Order, num_items: int) -> NDArray[np.int64]:
    """How many values have each bit, among those whose flag is 0 and among those whose flag is 1: [2, bits].

    Counts the values of ten bits at a time, which is many times faster than looking at each bit.
    """
    num_bits, parts = (num_items - 1).bit_length(), []
    for low in range(0, num_bits, 10):
        counts = np.bincount((values >> low & 1023) | flags << 10, minlength=2048).reshape(2, 1024)
        parts.append(counts @ _BITS_OF_TEN)
    return np.concatenate(parts, axis=1)[:, :num_bits]


_BITS_OF_TEN = np.arange(1024)[:, np.newaxis] >> np.arange(10) & 1


def _is_common(having: NDArray[Any], num_items: int) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.minimum(having, num_items - having) * RARE_BIT >= num_items
    return found


def _flip_scores(
    found: NDArray[np.int64], num_items: int, having: NDArray[np.int64], *, pairs: int, shared: int
) -> Floats:
    """See `flipped_bits`; bits that are rare are left out."""
    kept = _is_common(having, num_items)
    a = having[kept].astype(np.float64)
    b = num_items - a
    mixed = 2 * a * b / _falling(num_items, 2)
    mean = pairs * mixed
    apart = 4 * a * (a - 1) * b * (b - 1) / _falling(num_items, 4)
    variance = mean + shared * mixed + (pairs**2 - pairs - 2 * shared) * apart - mean**2
    return np.asarray((found[kept] - mean) / np.sqrt(variance))


def _pair_score(found: float, num_items: int, *, pairs: int, shared: int) -> float:
    """The formula of the head of this module, for a sum of products of `_centred_items`."""
    squares = num_items * (num_items**2 - 1) / 12 / num_items**2
    fourths = num_items * (num_items**2 - 1) * (3 * num_items**2 - 7) / 240 / num_items**4
    mean = -pairs * squares / _falling(num_items, 2)
    square = (
        pairs * (squares**2 - fourths) / _falling(num_items, 2)
        + 2 * shared * (2 * fourths - squares**2) / _falling(num_items, 3)
        + (pairs**2 - pairs - 2 * shared) * (3 * squares**2 - 6 * fourths) / _falling(num_items, 4)
    )
    return float(found - mean) / sqrt(square - mean**2)


def _binned(distance: Order, num_items: int) -> float:
    """Distances mod n, each of 1 to n - 1 as likely, in `NUM_BINS` bins: chi-square as a normal score."""
    wrapped = np.where(distance < 0, distance + num_items, distance) - 1
    # as many in each bin as there are distances with that floor, which need not be the same number
    bounds = [-(-number * (num_items - 1) // NUM_BINS) for number in range(NUM_BINS + 1)]
    expected = np.array([stop - start for start, stop in pairwise(bounds)]) * (len(wrapped) / (num_items - 1))
    counts = np.bincount(wrapped * NUM_BINS // (num_items - 1), minlength=NUM_BINS)
    return chi_square_score(float(((counts - expected) ** 2 / expected).sum()), NUM_BINS - 1)


def _table(order: Order, num_batches: int, num_topics: int) -> NDArray[np.int64]:
    num_items = len(order)
    batch = np.arange(num_items) * num_batches // num_items
    cells = batch * num_topics + order * num_topics // num_items
    return np.bincount(cells, minlength=num_batches * num_topics).reshape(num_batches, num_topics)


def _chi_square(table: NDArray[np.int64]) -> float:
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


def _table_score(table: NDArray[np.int64]) -> float:
    total = int(table.sum())
    v, w = [], []
    for sums in (table.sum(axis=1), table.sum(axis=0)):
        count = len(sums)
        v.append((count - 1) * (total - count) / (total - 1))
        w.append((total * float((1 / sums).sum()) - count**2) / (total - 2))
    mean = total * prod(size - 1 for size in table.shape) / (total - 1)
    variance = 2 * total / (total - 3) * (v[0] - w[0]) * (v[1] - w[1]) + total**2 / (total - 1) * w[0] * w[1]
    return float((_chi_square(table) - mean) / sqrt(variance))
