"""`probe` and `probe_until` against the rule written out, and the defects of the original that must not return."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.oneshot.batches import standard_loss
from secateur.oneshot.calibration import CalibratedModel
from secateur.oneshot.veto import MOST_GROWTH, Probe, Trial, agrees, growth, tempered
from secateur.scores import Score, resolve
from secateur.selection import Select
from tests.interrupts import hooks, unharmed
from tests.trained import Batches, Tower, classifier, loss_of


def largest_gradients(model: nn.Module, batches: Batches, names: list[str]) -> dict[str, Tensor]:
    most = {name: torch.zeros_like(model.get_parameter(name)) for name in names}
    for batch in batches:
        found = torch.autograd.grad(standard_loss(model, batch), [model.get_parameter(name) for name in names])
        most = {name: torch.maximum(most[name], g.abs()) for name, g in zip(names, found, strict=True)}
    return most


def by_the_book(
    model: nn.Module, batches: Batches, names: list[str], candidates: dict[str, Tensor], tolerance: float
) -> None:
    """Shrink, compare, restore, prune: for these tensors at once."""
    old = largest_gradients(model, batches, names)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            other.get_parameter(name)[candidates[name]] *= 0.1
    new = largest_gradients(other, batches, names)
    with torch.no_grad():
        for name in names:
            gone = candidates[name] & (new[name] <= old[name] * (1 + tolerance)) & (old[name] > 0)
            model.get_parameter(name)[gone] = 0


def magnitude_candidates(model: nn.Module, names: list[str], share: float) -> dict[str, Tensor]:
    found = {}
    for name in names:
        scores = model.get_parameter(name).detach().abs().flatten()
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[scores.argsort(stable=True)[: round(share * scores.numel())]] = True
        found[name] = mask.view(model.get_parameter(name).shape)
    return found


@pytest.mark.parametrize("order", ["joint", "reverse", "forward", "size"])
@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_the_rule_in_every_order(order: str, tolerance: float) -> None:
    model, batches = classifier()
    names = ["2.weight", "4.weight", "6.weight"]
    mine, book = model, copy.deepcopy(model)
    candidates = magnitude_candidates(book, names, 0.5)
    groups = {
        "joint": [names],
        "reverse": [[name] for name in names[::-1]],
        "forward": [[name] for name in names],
        "size": [["2.weight"], ["4.weight"], ["6.weight"]],
    }[order]
    for group in groups:
        by_the_book(book, batches, group, candidates, tolerance)
    report = sc.probe(
        mine, batches, score="magnitude", order=order, tolerance=tolerance, skip="0", scope="layer", only=names
    )
    for name in names:
        assert torch.equal(mine.get_parameter(name), book.get_parameter(name)), name
    assert 0 < report.sparsity < 0.5


def test_groups_and_blocks() -> None:
    model, batches = classifier()
    names = ["2.weight", "4.weight", "6.weight"]
    book = copy.deepcopy(model)
    candidates = magnitude_candidates(book, names, 0.5)
    for group in (["6.weight"], ["2.weight", "4.weight"]):
        by_the_book(book, batches, group, candidates, 0.0)
    sc.probe(model, batches, score="magnitude", order="reverse", group=2, skip="0", only=names)
    for name in names:
        assert torch.equal(model.get_parameter(name), book.get_parameter(name)), name
    torch.manual_seed(0)
    report = sc.probe(Tower(), torch.randint(0, 17, (4, 9)), order="reverse", group="block")
    assert 0 < report.sparsity <= 0.5


@pytest.mark.parametrize("order", ["forward", "reverse", "size"])
def test_blocks_are_probed_one_after_another(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own layers, and what is outside of all of them last."""
    probed: list[list[str]] = []
    plain = Probe.trials

    def watched(self: Probe, numbers: Any, candidates: Any) -> Any:
        probed.append([self.calibrated.prunables[n].name for n in numbers])
        return plain(self, numbers, candidates)

    monkeypatch.setattr(Probe, "trials", watched)
    model = Tower()
    sc.probe(model, torch.randint(0, 17, (4, 9)), order=order, group="block", only=["blocks.*", "lm_head*"])
    blocks = [[f"blocks.{n}.up.weight", f"blocks.{n}.down.weight"] for n in range(3)]
    expected = [*blocks, ["lm_head.weight"]]  # blocks are the larger ones here
    assert probed == (expected[::-1] if order == "reverse" else expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_pruned_is_restored_to_the_bit(dtype: torch.dtype) -> None:
    model, batches = classifier()
    model = model.to(dtype)
    cast = [(inputs.to(dtype), targets) for inputs, targets in batches]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = sc.probe(model, cast, skip="0", tolerance=0.2)
    assert 0 < report.pruned < 0.5 * report.prunable
    for name, tensor in model.state_dict().items():
        kept = report.masks.get(name, torch.ones_like(tensor, dtype=torch.bool))
        assert torch.equal(tensor[kept], before[name][kept])
        assert bool((tensor[~kept] == 0).all())


def test_weights_are_restored_when_the_second_look_fails() -> None:
    model, batches = classifier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2 * len(batches) + 3:  # the measure, the first look; then in the midst of the second
            raise RuntimeError("out of memory, say")
        return standard_loss(model, batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        sc.probe(model, batches, loss=loss, skip="0")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_veto_and_growth() -> None:
    old, new = torch.tensor([1.0, 1.0, 0.0, 0.0, 2.0]), torch.tensor([1.0, 1.1, 0.0, 1.0, 1.0])
    assert agrees(old, new, 0.0).tolist() == [True, False, True, False, True]
    assert agrees(old, new, 0.2).tolist() == [True, True, True, False, True]
    assert growth(old, new)[[0, 2, 3, 4]].tolist() == [1.0, 0.0, MOST_GROWTH, 0.5]
    ranked = tempered(torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0]), old, new)
    assert ranked[[0, 2, 3]].tolist() == [1.0, 0.0, MOST_GROWTH**0.5]
    assert float(ranked[4]) == pytest.approx(-(2.0**0.5))  # a gradient that fell makes a low score lower


def test_a_gradient_that_stays_zero_has_not_grown() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Flatten(), nn.Linear(8, 12, bias=False))
    model[0].weight.data[:, 3] = 0  # nothing ever comes through this input
    ids = torch.randint(0, 12, (20, 1))
    batches = [(part, part[:, 0]) for part in ids.split(5)]
    report = sc.probe(model, batches, score="magnitude", sparsity=0.9, tolerance=1e9, only="2")
    assert report.pruned == round(0.9 * report.prunable)


@pytest.mark.parametrize(
    "settings", [{}, {"scope": "layer", "order": "reverse"}, {"score": "wanda", "order": "forward"}]
)
def test_exact_meets_the_asked_sparsity(settings: dict[str, Any]) -> None:
    model, batches = classifier()
    report = sc.probe(model, batches, exact=True, sparsity=0.4, skip="0", **{"score": "variance", **settings})
    rows = report.tensors
    asked = round(0.4 * report.prunable)
    if report.scope == "layer":
        asked = sum(round(0.4 * row.numel) for row in rows)
    if report.scope == "row":
        asked = sum(row.shape[0] * round(0.4 * row.shape[1]) for row in rows)
    assert report.pruned == asked


def test_the_score_alone_and_other_tolerances_are_reported() -> None:
    model, batches = classifier()
    loose = copy.deepcopy(model)
    report = sc.probe(model, batches, skip="0", scope="layer", tolerances=(0.0, 0.3, 1e12))
    found = dict(report.found)
    assert found["loss on the first batches, after"] == pytest.approx(loss_of(model, batches), rel=1e-5)
    alone = next(name for name in found if "wanda alone" in name)
    assert float(alone.rpartition(" ")[2]) == pytest.approx(report.sparsity, abs=5e-4)
    assert any(f"tolerance 0, sparsity {report.sparsity:.4f}" in name for name in found)
    whole = next(name for name in found if "tolerance 1e+12" in name)
    assert "sparsity 0.5" in whole
    sc.prune(loose, batches, score="wanda", scope="layer", skip="0")
    assert found[whole] == pytest.approx(loss_of(loose, batches), rel=1e-5)


def test_candidates_are_scored_once_unless_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = CalibratedModel.facts
    monkeypatch.setattr(CalibratedModel, "facts", lambda *given: calls.append(1) or real(*given))  # type: ignore[func-returns-value]
    model, batches = classifier()
    sc.probe(model, batches, order="reverse", skip="0")
    assert len(calls) == 1
    calls.clear()
    model, batches = classifier()
    sc.probe(model, batches, order="reverse", skip="0", refresh=True)
    assert len(calls) == 4  # and once more for the score alone, on the dense model


def accuracy(batches: Batches) -> Any:
    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            return 100 * float(torch.cat([model(x).argmax(1) == y for x, y in batches]).float().mean())

    return evaluate


@pytest.mark.parametrize("order", ["joint", "reverse"])
@pytest.mark.parametrize("tune", [False, True, "both"])
def test_levels_rise_until_quality_falls(order: str, tune: bool | str) -> None:
    model, batches = classifier()
    evaluate = accuracy(batches)
    dense = evaluate(model)
    report = sc.probe_until(
        model, batches, evaluate, max_drop=2.0, tolerance=1e6, step=0.15, order=order, tune=tune, skip="0"
    )
    assert dense - evaluate(model) <= 2.0
    assert report.sparsity > 0.2
    assert report.pruned == sum(int((model.get_parameter(row.name) == 0).sum()) for row in report.tensors)
    rises = [update.pruned for update in report.updates]
    assert rises == sorted(rises)


@pytest.mark.parametrize("tune", [False, True, "both"])
def test_a_first_level_that_fails_leaves_the_dense_model(tune: bool | str) -> None:
    model, batches = classifier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quality = iter(range(1000, 0, -100))
    report = sc.probe_until(model, batches, lambda _: float(next(quality)), tolerance=1e9, tune=tune, start=0.9)
    assert report.pruned == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_plateau_ends_the_search() -> None:
    model, batches = classifier()
    report = sc.probe_until(model, batches, lambda _: 0.0, tolerance=1e9, start=0.05, step=1e-6)
    assert len(report.updates) == 3  # one that prunes, two that do not


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "random"}, "No order 'random'"),
        ({"group": 0}, "group is a number of layers"),
        ({"group": True}, "group is a number of layers"),
        ({"group": 1.5}, "group is a number of layers"),
        ({"group": "2"}, "group is a number of layers"),
        ({"shrink": 1.0}, "shrink must be in"),
        ({"tolerance": -0.1}, "tolerance must be at least 0"),
        ({"exact": True, "tolerance": 0.1}, "without a tolerance"),
        ({"exact": True, "order": "reverse", "scope": "model"}, "needs a sparsity for each layer"),
        ({"tolerances": (0.1,), "order": "reverse"}, "one joint probe"),
        ({"tolerances": (0.1, -1.0)}, "tolerances must be at least 0, all of them; got -1.0"),
        ({"tolerances": 0.5}, "tolerances must be several numbers, such as .0, 0.5.; got 0.5"),
        ({"tolerances": "ab"}, "tolerances must be several numbers"),
        ({"tolerance": "1"}, "tolerance must be at least 0: .* got '1'"),
        ({"tolerance": None}, "tolerance must be at least 0: .* got None"),
        ({"shrink": None}, "shrink must be in .* got None"),
        ({"evaluate": 5}, "evaluate must be a function of the model that returns a number; got 5"),
        ({"evaluate": lambda _: None}, "evaluate.model. must return a number; it returned a NoneType"),
        ({"evaluate": lambda _: torch.ones(2)}, "evaluate.model. must return a number; it returned a Tensor"),
        ({"tolerances": (0.1,), "exact": True}, "without a tolerance"),
        ({"group": "block"}, "A joint probe takes all layers at once: group='block' has no effect"),
        ({"refresh": True}, "chooses its candidates once: refresh has no effect"),
    ],
)
def test_what_cannot_be(settings: dict[str, Any], message: str) -> None:
    model, batches = classifier()
    with pytest.raises(sc.SecateurError, match=message):
        sc.probe(model, batches, **settings)


def test_levels_that_cannot_be() -> None:
    model, batches = classifier()
    for settings, message in (
        ({"start": 0.0}, "start must be above 0 and at most end, 0.99; got 0.0"),
        ({"start": 1.0}, "start"),
        ({"start": "a"}, "start must be above 0 .* got 'a'"),
        ({"step": 0.0}, "step must be above 0: how much each level adds; got 0.0"),
        ({"step": None}, "step must be above 0"),
        ({"start": 0.5, "end": 0.4}, "start must be above 0 and at most end, 0.4; got 0.5"),
        ({"end": 1.0}, "end must be a sparsity above 0 and below 1; got 1.0"),
        ({"max_drop": -0.5}, "max_drop must be at least 0: how much of the metric may be lost; got -0.5"),
        ({"max_drop": float("nan")}, "max_drop must be at least 0"),
        ({"tune": "all"}, "tune is"),
        ({"tune": True}, "none below 0"),
        ({"tune": "both", "tolerance": 0.0}, "Pass a tolerance above 0"),
        ({"group": 2}, "group=2 has no effect"),
        ({"order": "sideways"}, "No order"),
    ):
        with pytest.raises(sc.SecateurError, match=message):
            sc.probe_until(model, batches, lambda _: 0.0, **settings)  # type: ignore[arg-type]


def test_other_tolerances_know_what_was_gone_before() -> None:
    model, batches = classifier()
    with torch.no_grad():
        model[2].weight[:, ::3] = 0
    report = sc.probe(model, batches, tolerances=(0.0,), only="*")
    row = next(name for name, _ in report.found if "tolerance 0, sparsity" in name)
    assert row.endswith(f"{report.sparsity:.4f}")


def levels_tried(monkeypatch: pytest.MonkeyPatch, qualities: list[float], **settings: Any) -> list[tuple[float, float]]:
    """Level and tolerance of every probe of a search, when quality is this at each look."""
    tried: list[tuple[float, float]] = []
    plain = Probe.level

    def watched(self: Probe, sparsity: float, tolerance: float, *more: Any, **named: Any) -> Any:
        tried.append((round(sparsity, 6), tolerance))
        return plain(self, sparsity, tolerance, *more, **named)

    monkeypatch.setattr(Probe, "level", watched)
    model, batches = classifier()
    found = iter([*qualities, *[0.0] * 20])
    sc.probe_until(model, batches, lambda _: next(found), tolerance=8.0, start=0.2, step=0.1, **settings)
    return tried


def test_a_search_gives_up_when_no_tolerance_at_all_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = levels_tried(monkeypatch, [9, 9, 0, 0], max_drop=1.0, tune=True, order="reverse")
    assert tried == [(0.2, 8.0), (0.3, 8.0), (0.3, 0.0)]


def test_tuning_both_repeats_the_level_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = levels_tried(monkeypatch, [9, 9, 9, 0, 0], max_drop=1.0, tune="both")
    assert tried == [(0.2, 8.0), (0.3, 8.0), (0.4, 8.0), (0.3, 0.0), (0.4, 0.0)]


def test_a_drop_of_nothing_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels_tried(monkeypatch, [9, 9, 8.999, 0], max_drop=0.0, tune=False) == [(0.2, 8.0), (0.3, 8.0)]


@pytest.mark.parametrize("order", ["joint", "reverse"])
def test_interrupted_anywhere_the_model_is_as_it_was(order: str) -> None:
    model, batches = classifier()
    probed = partial(sc.probe, batches=batches, sparsity=0.5, order=order, tolerance=0.5)
    assert unharmed(model, probed, 6) >= 6
    searched = partial(
        sc.probe_until, batches=batches, evaluate=lambda now: -loss_of(now, batches), start=0.3, step=0.3, order=order
    )
    assert unharmed(model, searched, 6) >= 6


@pytest.mark.parametrize(
    "register",
    [(nn.Module, "register_forward_pre_hook"), (nn.Module, "register_forward_hook"),
     (Tensor, "register_post_accumulate_grad_hook")],
)  # fmt: skip
def test_ctrl_c_while_hooks_are_registered_leaves_none(
    register: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every single registration; once before the caller has the handle."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    batches = [(torch.randn(4, 8), torch.randint(0, 8, (4,)))] * 2
    plain, counts = getattr(*register), []

    def interrupted(at: int) -> bool:
        def once(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[-1] += 1
            handle = plain(self, *args, **kwargs)
            if counts[-1] == at:
                raise KeyboardInterrupt
            return handle

        counts.append(0)
        monkeypatch.setattr(*register, once)
        try:
            sc.probe(copy.deepcopy(model) if at < 0 else model, batches, order="reverse", only="*")
        except KeyboardInterrupt:
            return True
        return False

    assert not interrupted(-1)
    assert counts[0] >= 6
    for at in range(1, counts[0] + 1):
        assert interrupted(at)
        assert hooks(model) == 0, at


@pytest.mark.parametrize("search", [False, True])
def test_an_error_after_pruning_leaves_the_model_as_it_was(search: bool) -> None:
    model, batches = classifier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    zeros: list[int] = []

    def evaluate(now: nn.Module) -> float:
        zeros.append(sum(int((tensor == 0).sum()) for tensor in now.state_dict().values()))
        if len(zeros) == 2:
            raise RuntimeError("no data left")
        return 1.0

    work = sc.probe_until if search else sc.probe
    with pytest.raises(RuntimeError, match="no data left"):
        work(model, batches, evaluate=evaluate, tolerance=1e9)
    assert zeros[1] > zeros[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_candidates_may_be_shrunk_to_nothing() -> None:
    model, batches = classifier()
    assert sc.probe(model, batches, shrink=0.0).pruned > 0
    with pytest.raises(sc.SecateurError, match="shrink must be in"):
        sc.probe(model, batches, shrink=-0.01)


def test_a_trial_of_experts_spares_those_without_inputs() -> None:
    shape = torch.Size([3, 2, 2])
    old, new = torch.ones(shape), torch.ones(shape)
    new[0, 0, 0] = 2.0
    candidates = torch.ones(shape, dtype=torch.bool)
    candidates[:, 1, 1] = False
    trial = Trial(0, shape, candidates.flatten(), old, new, torch.tensor([True, False, True]))
    expected = candidates.clone()
    expected[1], expected[0, 0, 0] = False, False
    assert torch.equal(trial.agreed(0.0), expected)
    assert trial.spared() == 3


class Idle(nn.Module):
    """The second layer is called only for inputs that never come."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.idle if bool((inputs > 1e9).any()) else self.used
        return self.last(torch.relu(first(inputs)))


def test_spared_candidates_are_noted_only_where_there_are_some() -> None:
    torch.manual_seed(0)
    model, batches = classifier()
    said = "candidates are kept because no inputs reached them"
    assert not [note for note in sc.probe(model, batches, score="magnitude", scope="layer").notes if said in note]
    idle = Idle()
    report = sc.probe(idle, batches, score="magnitude", scope="layer", order="reverse", tolerance=1e9)
    assert bool((idle.idle.weight != 0).all())
    assert [note for note in report.notes if f"256 {said}" in note]
    exact = sc.probe(Idle(), batches, score="magnitude", scope="layer", exact=True)
    assert not [note for note in exact.notes if said in note]


def test_gradients_after_other_masks_are_of_the_weights_in_them() -> None:
    """States that enter late blocks are forgotten when masks of early blocks change."""
    torch.manual_seed(0)
    model, ids = Tower(), torch.randint(0, 17, (4, 9))
    calibrated = CalibratedModel(model, ids)
    work = Probe(
        calibrated, resolve("magnitude"), Select("layer", None, None), shrink=0.1, order="forward", group="block"
    )
    late = [prunable for prunable in calibrated.prunables if prunable.name.startswith("blocks.2")]
    for _ in range(2):  # seen on the way, then used
        before = calibrated.gradients({"gradient_max"}, late)
    work.set_masks([mask if n else torch.zeros_like(mask) for n, mask in enumerate(calibrated.held.masks)])
    assert not bool(model.blocks[0].up.weight.any())
    after = calibrated.gradients({"gradient_max"}, late)
    for prunable in late:
        right = calibrated.gradients({"gradient_max"})[prunable.name]["gradient_max"]
        assert torch.equal(after[prunable.name]["gradient_max"], right)
        assert not torch.equal(before[prunable.name]["gradient_max"], right)


def test_two_levels_that_prune_nothing_end_the_search_also_at_its_start() -> None:
    model, batches = classifier()
    report = sc.probe_until(model, batches, lambda _: 0.0, start=1e-9, step=1e-9)
    assert (len(report.updates), report.pruned) == (2, 0)


@pytest.mark.parametrize("order", ["joint", "reverse"])
@pytest.mark.parametrize("tune", [True, "both"])
def test_what_is_evaluated_has_the_sparsity_that_is_reported(order: str, tune: bool | str) -> None:
    """Also where a level is tried again with another tolerance, and where the search goes back."""
    model, batches = classifier()
    qualities = iter([9, 9, 9, 0, 9, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    weights = [model[n].weight for n in (0, 2, 4, 6)]
    seen: list[float] = []

    def evaluate(now: nn.Module) -> float:
        seen.append(sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights))
        return next(qualities)

    settings: dict[str, Any] = {"start": 0.2, "step": 0.1, "tolerance": 8.0, "only": "*", "order": order}
    report = sc.probe_until(model, batches, evaluate, tune=tune, **settings)
    said = [re.search(r"sparsity (0\.\d+)$", name) for name, _ in report.found]
    assert len(seen) == len(said) > 6
    assert any(name.startswith("back to") for name, _ in report.found)
    for share, found, (name, _) in zip(seen, said, report.found, strict=True):
        assert share == pytest.approx(float(found[1]) if found else 0.0, abs=6e-5), name


def sparsities_at_levels(monkeypatch: pytest.MonkeyPatch, tune: bool | str) -> tuple[list[float], list[float]]:
    """Sparsity before and after every probe of a search whose third level fails at first."""
    before: list[float] = []
    after: list[float] = []
    plain = Probe.level

    def watched(self: Probe, *given: Any, **named: Any) -> Any:
        before.append(self.calibrated.sparsity)
        trials = plain(self, *given, **named)
        after.append(self.calibrated.sparsity)
        return trials

    monkeypatch.setattr(Probe, "level", watched)
    model, batches = classifier()
    found = iter([9, 9, 9, 0, 0, *[0] * 20])
    settings: dict[str, Any] = {"start": 0.2, "step": 0.1, "tolerance": 8.0, "order": "reverse"}
    sc.probe_until(model, batches, lambda _: next(found), tune=tune, **settings)
    return before, after


def test_a_level_is_tried_again_from_the_last_good_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = sparsities_at_levels(monkeypatch, True)
    assert before == [0.0, *after[:2], after[1]]
    assert after[0] < after[1]


def test_tuning_both_goes_back_to_the_masks_before_the_last_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = sparsities_at_levels(monkeypatch, "both")
    assert before == [0.0, *after[:2], after[0], after[3]]
    assert after[0] < after[1]


def test_what_is_gone_counts_towards_the_next_level() -> None:
    """Also with a score that ranks zeros above all others."""
    model, batches = classifier()
    settings: dict[str, Any] = {"start": 0.2, "step": 0.1, "max_drop": 0.0, "tolerance": 1e9, "tune": False}
    figures = iter([9, 9, 9, 0, 0, 0])
    largest = Score("largest", lambda weight: -weight.abs())
    report = sc.probe_until(model, batches, lambda _: next(figures), score=largest, scope="model", **settings)
    assert [update.pruned for update in report.updates] == [round(share * report.prunable) for share in (0.2, 0.3)]


@pytest.mark.parametrize(("order", "copies"), [("joint", 3), ("reverse", 1)])
def test_a_joint_probe_plans_room_for_all_it_keeps(order: str, copies: int) -> None:
    """Gradients before and after, and the candidates' values."""
    model, batches = classifier()
    calibrated = CalibratedModel(model, batches)
    Probe(calibrated, resolve("magnitude"), Select("layer", None, None), shrink=0.1, order=order, group=1)
    assert calibrated.copies == copies


def test_nothing_is_printed_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    model, batches = classifier()
    sc.probe(model, batches, skip="0")
    sc.prune(model, batches, skip="0")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    sc.probe(model, batches, skip="0", progress=True)
    assert "gradients" in capsys.readouterr().err


def kept_after(monkeypatch: pytest.MonkeyPatch, shares: dict[float, float], qualities: list[float]) -> float:
    """The sparsity that a search keeps when a tolerance gives this sparsity at its one level."""

    def level(self: Probe, sparsity: float, tolerance: float, *_: Any, **__: Any) -> list[Trial]:
        found = []
        for mask in self.calibrated.held.masks:
            kept = torch.ones_like(mask, dtype=torch.bool)
            kept[: round(shares.get(tolerance, 0.6) * len(kept))] = False
            found.append(kept)
        self.set_masks(found)
        return []

    monkeypatch.setattr(Probe, "level", level)
    model, batches = classifier()
    looks = iter([*qualities, *[0.0] * 20])
    report = sc.probe_until(
        model, batches, lambda _: next(looks), tolerance=8.0, start=0.5, end=0.5, order="reverse", scope="layer"
    )
    return report.sparsity


def test_tuning_keeps_the_sparsest_result_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer a larger tolerance may end with fewer zeros: what is pruned early changes later gradients."""
    shares = {8.0: 0.75, 0.0: 0.25, 2.0: 0.5, 4.0: 0.4375}
    assert kept_after(monkeypatch, shares, [9, 0, 9, 9, 9]) == pytest.approx(0.5, abs=0.01)
    shares = {8.0: 0.75, 0.0: 0.25, 2.0: 0.4375, 4.0: 0.5}
    assert kept_after(monkeypatch, shares, [9, 0, 9, 9, 9]) == pytest.approx(0.5, abs=0.01)


def test_tuning_is_on_where_there_is_a_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels_tried(monkeypatch, [9, 9, 0], max_drop=1.0, order="reverse") == [(0.2, 8.0), (0.3, 8.0), (0.3, 0.0)]


def test_the_last_level_may_be_named() -> None:
    model, batches = classifier()
    report = sc.probe_until(model, batches, lambda _: 0.0, tolerance=1e9, start=0.2, step=0.3, end=0.6, skip="0")
    assert [update.asked for update in report.updates] == pytest.approx([0.2, 0.5, 0.6])


def test_losses_of_the_calibration_are_called_so() -> None:
    model, batches = classifier()
    assert [note for note in sc.probe(model, batches).notes if "The losses are of calibration batches" in note]
    notes = sc.probe(model, batches, evaluate=lambda _: 0.0).notes
    assert not [note for note in notes if "calibration batches" in note]


@pytest.mark.parametrize("search", [True, False])
def test_a_metric_sees_the_model_in_evaluation_mode(search: bool) -> None:
    """Or every evaluation would move the statistics of batch normalization, and dropout would make levels noise."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 3)).train()
    batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(2)]
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}

    def metric(now: nn.Module) -> float:
        assert not any(module.training for module in now.modules())
        assert all(parameter.requires_grad for parameter in now.parameters())
        return -nn.functional.cross_entropy(now(batches[0][0]), batches[0][1]).item()

    if search:
        sc.probe_until(model, batches, metric, step=0.4)
    else:
        sc.probe(model, batches, evaluate=metric)
    assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())
    assert all(module.training for module in model.modules())
