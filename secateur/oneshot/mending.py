"""What is done to layers on the way through a model: surviving weights repaired, or SparseGPT."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from secateur.errors import FactError, PatternError
from secateur.model.prunable import Site, Unfit, unfit_for
from secateur.oneshot.passage import in_order
from secateur.oneshot.reconstruct import COLUMNS, DAMPING, cheapest, damped, groups_of, inverse_factor, solve, sweep
from secateur.oneshot.subject import Subject
from secateur.selection.tiles import Layout, Pattern, tile_of

STEPS = 10  # of conjugate gradients; 30 leave perplexity where 6 do
TOWARD_DENSE = 0.5  # how much of the aim is the dense model's output, the rest that of dense weights on today's inputs


def as_matrices(tensor: Tensor, layout: Layout, count: int) -> list[Tensor]:
    """The matrices `[outputs, inputs]` of a contiguous weight, as views; a convolution has one for each group."""
    if len(layout.rows) > 1:
        return [part if layout.inputs == 2 else part.t() for part in tensor]
    return [tensor.t()] if layout.inputs == 0 else list(tensor.view(tensor.shape[0], -1).chunk(count))


def repair(subject: Subject, dense: Mapping[str, Tensor]) -> None:
    """Change what survives so that every layer gives what it gave in the dense model, as nearly as it can."""
    masks = subject.masks()
    short: set[str] = set()

    def work(site: Site, products: Tensor, crosses: Tensor | None, tokens: Tensor) -> None:
        weight = site.parameter.detach()
        mended, count = weight.contiguous(), len(products)
        before = as_matrices(dense[site.name].to(weight.device).contiguous(), site.layout, count)
        kept = as_matrices(masks[site.name].to(weight.device).contiguous(), site.layout, count)
        for number, mine in enumerate(as_matrices(mended, site.layout, count)):
            product, seen = products[number], int(tokens[number])
            if seen == 0 or bool(kept[number].all()):
                continue
            scarce = product.shape[0] / seen  # more features than inputs: what they leave open is settled by damping
            short.update([site.name] if scarce > 1 else [])
            whole = damped(product, DAMPING * max(1.0, scarce))
            aim = product if crosses is None else torch.lerp(product, crosses[number], TOWARD_DENSE)
            found = solve(before[number].float() @ (aim + whole - product), mine.float(), kept[number], whole, STEPS)
            if not bool(found.to(mine.dtype).isfinite().all()):
                raise FactError(f"{site.name!r} cannot be repaired: the solution is not finite in {mine.dtype}.")
            mine.copy_(found)
        weight.copy_(mended)

    _note_idle(subject, in_order(subject, "repair", work, dense), "were not repaired")
    if short:
        subject.notes["short"] = f"{len(short)} layers have more inputs than the batches have tokens: damped more."
    subject.apply()


def sparsegpt_unfit(pattern: Pattern | None) -> Unfit:
    """Says of a site whether SparseGPT cannot give it this pattern: its columns are not the inputs of a convolution."""

    def unfit(site: Site) -> str | None:
        if site.fragile:
            return "'sparsegpt' might prune a row whole, which weight_norm divides by"
        if pattern is not None and _is_convolution(site):
            return "'sparsegpt' gives convolutions no pattern; sparsity counts the others alone"
        return unfit_for(pattern)(site)

    return unfit


def _is_convolution(site: Site) -> bool:
    return site.parameter.ndim > 2 and len(site.layout.rows) == 1


def sparsegpt(subject: Subject, sparsity: float, pattern: Pattern | None) -> list[Tensor]:
    """SparseGPT (Frantar and Alistarh 2023): masks and weights together, column by column. The masks, flat."""
    for site in subject.sites:
        tile_of(site.name, site.parameter.shape, site.layout, pattern)
        if pattern is not None and (_is_convolution(site) or COLUMNS % pattern.inputs):
            raise PatternError(f"'sparsegpt' cannot give {site.name!r} the pattern {pattern.text!r}. Skip it.")
        if _is_convolution(site) and site.layout.inputs != 1:
            raise PatternError(f"'sparsegpt' cannot prune {site.name!r} ({site.reason}). Use a score, or skip it.")
    masks = {name: mask.clone() for name, mask in subject.masks().items()}
    dampings: list[float] = []

    def work(site: Site, products: Tensor, crosses: Tensor | None, tokens: Tensor) -> None:
        mended, kept = site.parameter.detach().contiguous(), masks[site.name].contiguous()
        total, span = mended.numel(), COLUMNS if pattern is None else pattern.inputs
        choose = cheapest(sparsity, total) if pattern is None else groups_of(pattern.kept or 0, pattern.inputs)
        views = zip(
            as_matrices(mended, site.layout, len(products)),
            as_matrices(kept, site.layout, len(products)),
            products,
            tokens.tolist(),
            strict=True,
        )
        for mine, mask, product, seen in views:
            product = product if seen else torch.eye(len(product), dtype=product.dtype, device=product.device)
            factor, damping = inverse_factor(product)
            dampings.append(damping)
            alive = None if bool(mask.all()) else mask.to(mine.device)
            found, chosen = sweep(mine.float(), factor, choose, span, alive, product.diagonal() == 0)
            mine.copy_(found)
            mask.copy_(chosen)
        site.parameter.detach().copy_(mended)
        masks[site.name] = kept

    idle = in_order(subject, "sparsegpt", work)
    _note_idle(subject, idle, "were pruned by magnitude")
    for site in idle:
        width = as_matrices(site.parameter.detach().contiguous(), site.layout, 1)[0].shape[1]
        count = site.parameter.shape[0] if len(site.layout.rows) > 1 else 1
        same = torch.zeros(width, width, dtype=torch.float32, device=site.parameter.device)
        work(site, same.expand(count, width, width), None, torch.zeros(count, dtype=torch.int64, device="cpu"))
    if again := sum(damping > DAMPING for damping in dampings):
        subject.notes["damping"] = f"{again} of {len(dampings)} matrices X^T X were not positive definite: damped more."
    return [mask.reshape(-1) for mask in masks.values()]


def _note_idle(subject: Subject, idle: list[Site], what: str) -> None:
    if idle:
        shown = ", ".join(site.name for site in idle[:3]) + (", ..." if idle[3:] else "")
        subject.notes["idle"] = f"{len(idle)} layers that the batches never used {what}: {shown}"
