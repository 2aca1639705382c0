"""Gathering in less memory: statistics on the host, activations made again, means rounded by chance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.errors import FactError
from secateur.model.prunable import find_prunable
from secateur.oneshot.calibration import Subject
from secateur.oneshot.gradients import Gradients, gather_gradients, rounded_by_chance
from secateur.oneshot.offload import Thrift, as_bytes, made_again, plan
from tests.trained import Tower

IDS = torch.randint(0, 17, (5, 9), generator=torch.Generator().manual_seed(0))


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


@pytest.mark.parametrize("thrift", [Thrift(room=300, again=True), Thrift(again=True), Thrift(room=0)])
def test_every_way_gives_the_same_masks(thrift: Thrift, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [
        sc.prune(tower(), IDS, rounds=2).masks,
        sc.probe(tower(), IDS, tolerance=0.5).masks,
        sc.probe(tower(), IDS, exact=True, score="variance").masks,
    ]
    monkeypatch.setattr(Subject, "thrift", lambda *_: thrift)
    found = [
        sc.prune(tower(), IDS, rounds=2).masks,
        sc.probe(tower(), IDS, tolerance=0.5).masks,
        sc.probe(tower(), IDS, exact=True, score="variance").masks,
    ]
    for mine, right in zip(found, expected, strict=True):
        assert all(torch.equal(mine[name], mask) for name, mask in right.items())


def test_only_so_many_statistics_stay_where_the_weights_are() -> None:
    sites, _ = find_prunable(tower().to("meta"))
    sizes = [site.parameter.numel() for site in sites]
    found = Gradients(sites, {"gradient_max", "exp_avg_sq"}, 3, room=sizes[0] + sizes[1] + sizes[2] - 1)
    stayed = [all(t.device.type == "meta" for t in found.facts[site.name].values()) for site in sites]
    assert stayed[:2] == [True, True]
    assert sum(size for size, here in zip(sizes, stayed, strict=True) if here) < sum(sizes[:3])
    assert all(
        t.device.type == "cpu" for site, here in zip(sites, stayed, strict=True) if not here
        for t in found.facts[site.name].values()
    )  # fmt: skip


def test_blocks_are_run_again_on_the_way_back_and_only_inside() -> None:
    model = tower()
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: None)
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    with made_again(list(model.blocks)):
        model(IDS).square().mean().backward()
    assert len(calls) == 2
    assert not any("forward" in vars(block) for block in model.blocks)
    model(IDS).square().mean().backward()
    assert len(calls) == 3


def test_another_librarys_forward_is_put_back() -> None:
    model = tower()
    own = model.blocks[1].forward
    model.blocks[1].forward = mine = lambda *given, **named: own(*given, **named)
    with made_again(list(model.blocks)):
        model(IDS)
    assert vars(model.blocks[1])["forward"] is mine


def test_rounding_by_chance_is_right_on_average() -> None:
    draw = torch.Generator().manual_seed(0)
    value = 1.0 + 0.3 / 128  # three tenths of the way between two neighbours in bf16
    found = rounded_by_chance(torch.full((20000,), value), draw)
    assert torch.equal(found.bfloat16().float(), found)
    assert set(found.tolist()) == {1.0, 1.0 + 1 / 128}
    assert float(found.mean()) == pytest.approx(value, abs=1e-4)


def test_sums_in_bf16_do_not_stand_still() -> None:
    """Two thousand equal squares: rounded to the nearest, the sum would stop growing at a few hundred."""
    layer = nn.Linear(64, 64, bias=False)
    sites, _ = find_prunable(layer, only="*")
    with Gradients(sites, {"exp_avg_sq"}, 2000, torch.bfloat16) as found:
        for _ in range(2000):
            layer.weight.grad = None
            layer.weight.sum().backward()
    assert float(found.facts["weight"]["exp_avg_sq"].float().mean()) == pytest.approx(1.0, rel=0.02)
    exact = gather_gradients(
        layer, [None], sites, {"gradient_max"}, loss=lambda m, _: m.weight.sum(), dtype=torch.bfloat16
    )
    assert bool((exact["weight"]["gradient_max"] == 1).all())


def test_memory_in_words() -> None:
    assert as_bytes("24GB") == 24 * 10**9
    assert as_bytes(" 1.5 GiB") == 3 << 29
    assert as_bytes(7) == 7
    assert as_bytes(None) is None
    with pytest.raises(FactError, match="something like '24GB'"):
        as_bytes("lots")
    model = tower()
    sites, _ = find_prunable(model)
    assert plan(model, IDS[:1], lambda m, b: m(b).sum(), sites, [], None) == Thrift()


def test_channels_last_in_bf16_and_what_is_not_a_number() -> None:
    layer = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    sites, _ = find_prunable(layer, only="*")
    batch = [torch.randn(2, 4, 8, 8)]
    loss = lambda model, inputs: model(inputs).square().mean()  # noqa: E731
    rough = gather_gradients(layer, batch, sites, {"exp_avg_sq"}, loss=loss, dtype=torch.bfloat16)["weight"][
        "exp_avg_sq"
    ]
    exact = gather_gradients(layer, batch, sites, {"exp_avg_sq"}, loss=loss)["weight"]["exp_avg_sq"]
    torch.testing.assert_close(rough.float(), exact, rtol=0.02, atol=0)
    for bits in (0x7FFFFFFF, 0x7FC00000, -1):
        values = torch.full((4,), bits, dtype=torch.int32).view(torch.float32)
        assert bool(rounded_by_chance(values, torch.Generator()).isnan().all())
