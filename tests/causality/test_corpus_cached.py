"""Every cached entry: its pass without a cache is causal, and only a correct one gives the same logits in chunks."""

import pytest
import torch

from tests.causality import corpus

ENTRIES = [pytest.param(entry, id=entry.name) for entry in corpus.entries() if entry.interface == "cached"]
CHUNKS = ([1] * 60, [60], [8] * 7 + [4], [1, 20, 39], [40] + [1] * 20, [25, 1, 1, 33])


def in_chunks(model, ids, sizes):
    cache, parts = None, []
    for chunk in ids.split(sizes, dim=1):
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


@torch.no_grad()
@pytest.mark.parametrize("entry", ENTRIES)
def test_chunks_give_the_logits_of_one_pass(entry):
    generator = torch.Generator().manual_seed(0)
    ids, other = torch.randint(0, 61, (2, 2, 60), generator=generator)
    full = entry.build().double()(ids).logits
    for cut in (1, 8, 31, 59):
        suffix = torch.cat([ids[:, :cut], other[:, cut:]], 1)
        assert torch.equal(entry.build().double()(suffix).logits[:, :cut], full[:, :cut])
    differences = []
    for sizes in CHUNKS:
        model = entry.build().double()
        in_chunks(model, other, [20, 40])  # an earlier sequence
        differences.append(float((in_chunks(model, ids, sizes) - full).abs().max()))
    assert (max(differences) > 1e-3) == entry.leaks, differences
    assert entry.leaks or max(differences) < 1e-12
