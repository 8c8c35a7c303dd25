"""Upstream's statistics of several responses to a problem: mean, best, worst and majority of n.

A run reports ``compute_validation_metrics``; these are for callers that collect results of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """(mean, deviation) of each function over ``n_bootstrap`` draws of ``subset_size`` of the data, with replacement.

    A function gets an array of the draw, or a list when the data are not numbers. ValueError for no data.
    """
    random = np.random.RandomState(seed)
    found: list[list[float]] = [[] for _ in reduce_fns]
    values = np.asarray(data) if data is not None and all(np.isscalar(value) for value in data) else None
    for _ in range(n_bootstrap):
        places = random.choice(len(data), subset_size, replace=True)
        drawn = values[places] if values is not None else [data[place] for place in places]
        for results, reduce in zip(found, reduce_fns, strict=True):
            results.append(float(reduce(drawn)))
    return [(float(np.mean(results)), float(np.std(results))) for results in found]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the first entry that has the most frequent vote; of several such votes the first."""
    winner, _ = Counter(entry[vote_key] for entry in data).most_common(1)[0]
    return float(next(entry[val_key] for entry in data if entry[vote_key] == winner))


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """Data source -> number in ``infos_dict`` -> metric -> mean over the problems of the source.

    Of a problem with N responses: ``mean@N``; from two on also ``std@N`` and, for n = 2, 4, ... N, ``best@n/mean`` and
    ``/std`` of the best of n, the same of ``worst@n``, and ``maj@n`` of the value of the majority of n where there is a
    column ``pred``. Those of n are bootstrapped.
    """
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows[key].append(row)
    collected: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (source, _), members in rows.items():
        for name, column in infos_dict.items():
            if isinstance(column[members[0]], str):
                continue
            values = [column[row] for row in members]
            votes = [infos_dict["pred"][row] for row in members] if "pred" in infos_dict else None
            by_metric = collected.setdefault(source, {}).setdefault(name, defaultdict(list))
            for metric, value in _of_one_problem(values, votes, seed).items():
                by_metric[metric].append(value)
    return {
        source: {
            name: {metric: float(np.mean(values)) for metric, values in by_metric.items()}
            for name, by_metric in by_name.items()
        }
        for source, by_name in collected.items()
    }


def _of_one_problem(values: Sequence[float], votes: Sequence[Any] | None, seed: int) -> dict[str, float]:
    count = len(values)
    found = {f"mean@{count}": float(np.mean(values))}
    if count == 1:
        return found
    found[f"std@{count}"] = float(np.std(values))
    sizes = [2**power for power in range(1, count.bit_length()) if 2**power < count] + [count]
    for n in sizes:
        best, worst = bootstrap_metric(values, n, [np.max, np.min], seed=seed)
        found |= {f"best@{n}/mean": best[0], f"best@{n}/std": best[1]}
        found |= {f"worst@{n}/mean": worst[0], f"worst@{n}/std": worst[1]}
        if votes is not None:
            entries = [{"val": value, "pred": vote} for value, vote in zip(values, votes, strict=True)]
            [majority] = bootstrap_metric(
                entries, n, [partial(calc_maj_val, vote_key="pred", val_key="val")], seed=seed
            )
            found |= {f"maj@{n}/mean": majority[0], f"maj@{n}/std": majority[1]}
    return found
