"""Accuracy of every method of pruning after training, on small networks of every kind trained here."""

from __future__ import annotations

import pytest

from tests.contract import METHODS, NETWORKS, below, result

NOISE = 2.0  # standard errors of a paired difference on 597 pictures: what chance alone may do


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", [method for method in METHODS if method != "magnitude"])
def test_at_half_no_method_falls_below_magnitude(name: str, method: str) -> None:
    found, report = result(name, method, 0.5)
    if report.scope != "row":  # rows are rounded one by one
        assert report.pruned == pytest.approx(0.5 * report.prunable, abs=len(report.tensors))
    assert below(found, result(name, "magnitude", 0.5)[0]) <= NOISE


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
@pytest.mark.parametrize("name", NETWORKS)
def test_recommended_is_not_below_variance(name: str, sparsity: float) -> None:
    assert below(result(name, "recommended", sparsity)[0], result(name, "variance", sparsity)[0]) <= NOISE


@pytest.mark.parametrize("name", NETWORKS)
def test_recommended_keeps_most_of_a_network_at_80_percent(name: str) -> None:
    assert float(result(name, "recommended", 0.8)[0].float().mean()) > 0.9
