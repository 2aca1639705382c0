"""Working through a model block by block, each with the inputs it has once the blocks before it are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from secateur.blocks import enter
from secateur.calibration import quiet
from secateur.inputs import Inputs, check_seen, gather_inputs, unseen
from secateur.reconstruction import DAMPING, cheapest, damped, groups_of, inverse_factor, solve, sweep
from secateur.sites import Site
from secateur.subject import Subject
from secateur.tiles import Layout, Pattern

STEPS = 30  # of conjugate gradients; more change perplexity by less than 0.1 %

Work = Callable[[Site, Tensor], None]  # a site and X^T X of its matrices


def as_matrices(tensor: Tensor, layout: Layout, count: int) -> list[Tensor]:
    """The matrices `[outputs, inputs]` of a weight, as views of it; `count` of them, where a convolution has groups."""
    if len(layout.rows) > 1:
        return [part if layout.inputs == 2 else part.t() for part in tensor]
    return [tensor.t()] if layout.inputs == 0 else list(tensor.flatten(1).chunk(count))


@torch.no_grad()
def through(subject: Subject, name: str, work: Work) -> None:
    """Do this work on every site, in the order data passes them."""
    model, sites, batches = subject.model, subject.sites, subject.batches
    blocks = subject.blocks
    with subject.stages.stage(name, max(1, len(blocks))) as tick:
        done: set[str] = set()
        if blocks:
            chain = enter(model, blocks, batches, subject.loss)
            for number, block in enumerate(blocks):
                inside = {id(parameter) for parameter in block.parameters()}
                mine = [site for site in sites if id(site.parameter) in inside]
                with quiet(model):
                    with Inputs(mine, products=True) as seen:
                        for batch in range(len(batches)):
                            chain.run(number, batch)
                    _work_on(mine, seen, work)
                    chain.advance(number)
                done |= {site.name for site in mine}
                tick()
        if rest := [site for site in sites if site.name not in done]:
            if blocks:
                subject.notes["blocks"] = f"{len(rest)} layers outside the blocks were done after them, all at once."
            else:
                subject.notes["blocks"] = "No blocks follow one another in this model: all layers were done at once."
            watch = Inputs(rest, products=True)
            gather_inputs(model, batches, watch, forward=subject.loss)
            check_seen(watch, rest)
            _work_on(rest, watch, work)
            tick()


def _work_on(sites: Sequence[Site], seen: Inputs, work: Work) -> None:
    idle = set(unseen(seen, sites))
    for site in sites:
        if site.name not in idle:
            work(site, seen.product(site))


def repair(subject: Subject, dense: Mapping[str, Tensor]) -> None:
    """Change what survives so that every layer gives what it gave with its dense weights, as nearly as it can."""
    masks = subject.masks()

    def work(site: Site, products: Tensor) -> None:
        weight = site.parameter.detach()
        views = zip(
            as_matrices(weight, site.layout, len(products)),
            as_matrices(dense[site.name].to(weight.device), site.layout, len(products)),
            as_matrices(masks[site.name], site.layout, len(products)),
            products,
            strict=True,
        )
        for mine, before, mask, product in views:
            if bool(product.any()) and not bool(mask.all()):
                whole = damped(product)
                mine.copy_(solve(before.float() @ whole, mine.float(), mask, whole, STEPS))

    through(subject, "repair", work)
    subject.apply()


def sparsegpt(subject: Subject, sparsity: float, pattern: Pattern | None) -> list[Tensor]:
    """SparseGPT (Frantar and Alistarh 2023): masks and weights together, column by column. The masks, flat."""
    masks = subject.masks()
    sweeps: list[float] = []

    def work(site: Site, products: Tensor) -> None:
        kept_in = as_matrices(masks[site.name], site.layout, len(products))
        views = as_matrices(site.parameter.detach(), site.layout, len(products))
        for mine, kept, product in zip(views, kept_in, products, strict=True):
            factor, damping = inverse_factor(product)
            sweeps.append(damping)
            if pattern is None:
                found, mask = sweep(mine.float(), factor, cheapest(sparsity))
            else:
                assert pattern.kept is not None
                choose = groups_of(pattern.kept, pattern.inputs)
                found, mask = sweep(mine.float(), factor, choose, pattern.inputs)
            mine.copy_(found)
            kept.copy_(mask)

    through(subject, "sparsegpt", work)
    if again := sum(damping > DAMPING for damping in sweeps):
        subject.notes["damping"] = f"{again} of {len(sweeps)} matrices X^T X were not positive definite: damped more."
    return [mask.reshape(-1) for mask in masks.values()]
