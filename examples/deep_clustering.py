r"""
Deep clustering
===============

**Problem.** Group 1,797 images of handwritten digits (8 × 8 pixels, scikit-learn) without looking at the labels:
train an encoder :math:`\psi` so that its outputs :math:`\hat y = \psi(u)` cluster. Scored against the true digits
by the adjusted Rand index (ARI) and normalised mutual information (NMI): 1 is perfect, 0 is chance.

**Method.** Minimise

.. math:: F(u) = \frac1n\sum_i\|V\hat y_i - \bar x_i\|^2 + \gamma\,h(\hat y) .

The first term keeps the outputs from collapsing: an orthonormal decoder V maps them to averages :math:`\bar x_i`
over the neighbourhood of an image (eight steps of averaging over ten nearest neighbours). The second, h, is a
clustering objective. The encoder is trained on the first term alone, and from there on both, with each of three
objectives. Clusters are read off by ``objective.solve``; the centroids of convex clustering, which joins images to
their neighbours and does not know how many digits there are, are put into ten groups by k-means.

**Statement.** Paragraph "Unsupervised learning" of section 2.2 of the paper and its appendix
``ssec:unsupervised_obj``: the objective is itself a minimum. With z the minimiser the gradient is
:math:`\frac1n(\hat y - z)` for all three. Convex clustering (``cvx_clustering``) is a Moreau envelope, convex and
smooth; k-means and spectral clustering have kinks.

**Result.** All encoders are better than raw pixels, and each objective improves on the encoder without it. Most of
the gain is due to the averages over neighbours, of which k-means alone, without a network, is better still (last
row): the encoder has to predict them from one image.
"""

from __future__ import annotations

import copy

import sklearn.cluster
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch import Tensor, nn

from surefoot.clustering import Clustering, ConvexClustering, KMeans, Spectral, nearest_neighbours

DIGITS, DIMENSION = 10, 16
OBJECTIVES = {  # with its weight γ
    "k-means": (KMeans(DIGITS, warm_start=True), 5.0),
    "spectral": (Spectral(DIGITS), 10.0),
    "convex clustering": (ConvexClustering("knn", penalty=0.2, tolerance=1e-3), 3.0),
}


def main() -> Figure:
    """Train one encoder, refine it with each objective; print and draw the scores."""
    scores: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    averages = averaged(x)
    decoder = torch.linalg.svd(averages, full_matrices=False).Vh[:DIMENSION]

    print(f"{'':<56} ARI    NMI")
    scores["raw pixels"] = show("k-means of raw pixels", by_kmeans(x), digits)
    encoder = nn.Sequential(
        nn.Linear(64, 128), nn.Softplus(), nn.Linear(128, 64), nn.Softplus(), nn.Linear(64, DIMENSION)
    )
    train(encoder, x, averages, decoder, steps=500, rate=1e-2)
    with torch.no_grad():
        scores["encoder"] = show("k-means of the outputs of the encoder", by_kmeans(encoder(x)), digits)
    for name, (objective, weight) in OBJECTIVES.items():
        refined = copy.deepcopy(encoder)
        if isinstance(objective, ConvexClustering):
            objective.bind(x)
        before, after = train(
            refined, x, averages, decoder, steps=60, rate=1e-3, objective=objective, weight=weight
        )
        with torch.no_grad():
            said = f"encoder refined by {name}, h {before:.3f} → {after:.3f}"
            scores[f"refined: {name}"] = show(said, clusters(objective, refined(x)), digits)
    scores["averages over neighbours"] = show("k-means of averages over neighbours", by_kmeans(averages), digits)
    torch.set_num_threads(threads)
    figure = Figure(figsize=(6.5, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(list(scores), list(scores.values()))
    axes.invert_yaxis()
    axes.set_xlabel("adjusted Rand index")
    return figure


def averaged(x: Tensor, times: int = 8) -> Tensor:
    """Averages over nearest neighbours, repeated, around their mean."""
    edges = nearest_neighbours(x, 10)
    weights = torch.eye(len(x))
    weights[edges.first, edges.second] = weights[edges.second, edges.first] = edges.weights.float()
    weights /= weights.sum(dim=1, keepdim=True)
    for _ in range(times):
        x = weights @ x
    return x - x.mean(dim=0)


def train(
    encoder: nn.Module,
    x: Tensor,
    averages: Tensor,
    decoder: Tensor,
    *,
    steps: int,
    rate: float,
    objective: Clustering | None = None,
    weight: float = 0.0,
) -> tuple[float, float]:
    """Adam with a falling rate; returns the clustering objective before the first and the last step."""
    optimizer = torch.optim.Adam(encoder.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = encoder(x)
        loss = (outputs @ decoder - averages).square().sum(dim=1).mean()
        if objective is not None:
            h = objective(outputs)
            values.append(float(h.detach()))
            loss = loss + weight * h
        loss.backward()
        optimizer.step()
        schedule.step()
    return (values[0], values[-1]) if values else (0.0, 0.0)


def clusters(objective: Clustering, outputs: Tensor) -> Tensor:
    """Labels of ten groups."""
    found = objective.solve(outputs)
    return by_kmeans(found.centroids) if isinstance(objective, ConvexClustering) else found.labels


def by_kmeans(points: Tensor) -> Tensor:
    """Labels by scikit-learn's k-means."""
    return torch.as_tensor(sklearn.cluster.KMeans(DIGITS, n_init=10, random_state=0).fit_predict(points.numpy()))


def show(name: str, labels: Tensor, digits: object) -> float:
    """One row of the table; the adjusted Rand index."""
    found = labels.tolist()
    score = float(adjusted_rand_score(digits, found))
    print(f"{name:<56} {score:.3f}  {normalized_mutual_info_score(digits, found):.3f}", flush=True)
    return score


if __name__ == "__main__":
    figure = main()
