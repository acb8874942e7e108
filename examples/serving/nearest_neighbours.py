"""Recommendations from a nearest-neighbour index.

Predictions as inner products, offsets folded in (faiss-cpu).

python examples/serving/nearest_neighbours.py

For catalogues of millions, an approximate index (IVF, HNSW) looks at a small part of the columns.
Without faiss the same search is made with NumPy.
"""

from __future__ import annotations

import numpy as np

from fisherfold import MatrixCompletion

try:
    import faiss
except ImportError:
    faiss = None


def search(items: np.ndarray, users: np.ndarray, k: int) -> np.ndarray:
    """The k items with the largest inner products for each user."""
    if faiss is None:
        return np.argsort(-(users @ items.T), axis=1, kind="stable")[:, :k]
    index = faiss.IndexHNSWFlat(items.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.add(items)
    return index.search(users, k)[1]


def main() -> float:
    """Fit, search, and compare with ``recommend``; the share of lists' entries that agree."""
    rng = np.random.default_rng(0)
    table = 3 + rng.normal(size=(300, 3)) @ rng.normal(size=(3, 500)) / 2 + rng.normal(size=500) / 2
    pairs = np.argwhere(rng.random(table.shape) < 0.2)
    model = MatrixCompletion(rank=5).fit(
        pairs, table[tuple(pairs.T)] + 0.3 * rng.normal(size=len(pairs))
    )

    users, items = model.inner_product_vectors()  # users @ items.T are the predictions
    found = model.column_ids_[search(items, users, 10)]
    exact = model.recommend(k=10, exclude_seen=False)["column"].to_numpy().reshape(len(users), 10)
    agree = float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, exact, strict=True)]))
    print(f"{'faiss (HNSW)' if faiss else 'NumPy'}: {agree:.1%} of the entries of the exact lists")
    return agree


if __name__ == "__main__":
    main()
