"""Where the distance from the teacher lies: by position in the sequence, by how sure the teacher was, by source of the text.

Sums are kept by sequence, so that every stratum has an interval over sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.records.record import FidelityStratum

DECILES = 10


def by_position(kl: Sequence[Tensor], agree: Sequence[Tensor]) -> list[FidelityStratum]:
    """Tokens with 1, 2-3, 4-7, 8-15, ... tokens before them. kl, agree: one tensor [T - 1] a sequence."""
    longest = max(len(values) for values in kl)
    found = []
    for power in range(longest.bit_length()):
        first, last = 2**power, 2 ** (power + 1) - 1
        chosen = [torch.arange(min(first - 1, len(values)), min(last, len(values))) for values in kl]
        name = str(first) if first == last else f"{first}-{last}"
        found.append(_stratum(name, kl, agree, chosen))
    return found


def by_entropy(kl: Sequence[Tensor], agree: Sequence[Tensor], entropy: Sequence[Tensor]) -> list[FidelityStratum]:
    """Deciles of the teacher's entropy, in nats: the surest tenth of the tokens first. Fewer where values are equal."""
    every = torch.cat(list(entropy)).double().sort().values
    cuts = [float(every[len(every) * k // DECILES]) for k in range(1, DECILES)]
    edges = [-torch.inf, *dict.fromkeys(cuts), torch.inf]
    found = []
    for number, (low, high) in enumerate(itertools.pairwise(edges), 1):
        chosen = [((values >= low) & (values < high)).nonzero().flatten() for values in entropy]
        inside = torch.cat([values[those] for values, those in zip(entropy, chosen, strict=True)])
        if len(inside):
            name = f"{number}: {float(inside.min()):.3g}-{float(inside.max()):.3g} nats"
            found.append(_stratum(name, kl, agree, chosen))
    return found


def by_domain(kl: Sequence[Tensor], agree: Sequence[Tensor], domains: Sequence[str]) -> list[FidelityStratum]:
    """Sources of the text, by name."""
    found = []
    for domain in dict.fromkeys(domains):
        chosen = [torch.arange(len(v) if of == domain else 0) for v, of in zip(kl, domains, strict=True)]
        found.append(_stratum(domain, kl, agree, chosen))
    return found


def _stratum(name: str, kl: Sequence[Tensor], agree: Sequence[Tensor], chosen: Sequence[Tensor]) -> FidelityStratum:
    return FidelityStratum(
        name=name,
        tokens=[len(those) for those in chosen],
        kl_sum=[float(values[those].sum()) for values, those in zip(kl, chosen, strict=True)],
        top1_agree=[int(values[those].sum()) for values, those in zip(agree, chosen, strict=True)],
    )
