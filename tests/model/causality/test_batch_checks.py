"""The overlap of two texts, against literal shares and a set of passages."""

import pytest
import torch

from tril.model.causality.batch_checks import check_overlap, passage_hashes


@pytest.mark.parametrize(("copied", "share"), [(49, 0.0), (50, 50 / 3200), (60, 60 / 3200)])
def test_passages_of_50_tokens_count(copied, share):
    train, validation = torch.arange(10_000), torch.arange(20_000, 23_200)
    validation[100 : 100 + copied] = train[7_000 : 7_000 + copied]
    result = check_overlap(train, validation)
    assert result.worst == pytest.approx(share) and result.passed is (share == 0)
    assert ("starts at token 100 of the validation text" in result.where) is (share > 0)


@pytest.mark.parametrize(("copied", "passes"), [(32, True), (33, False)])
def test_one_percent_is_the_limit(copied, passes):
    """32 passages of 100 tokens are 1 % of 320,000."""
    train, validation = torch.arange(10_000), torch.arange(20_000, 340_000)
    for start in range(copied):
        validation[5_000 * start : 5_000 * start + 100] = train[100 * start : 100 * start + 100]
    assert check_overlap(train, validation).passed is passes


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 31, 50])
def test_hashes_are_equal_where_passages_are(size):
    ids = torch.randint(2, (400,), generator=torch.Generator().manual_seed(size))
    ids[200:300] = ids[20:120]
    passages = list(map(tuple, ids.unfold(0, size, 1).tolist()))
    pairs = set(zip(passages, passage_hashes(ids.numpy(), size).tolist(), strict=True))
    assert len(pairs) == len(set(passages)) == len({value for _, value in pairs}) < len(passages)


def test_a_text_shorter_than_a_passage_has_none():
    assert check_overlap(torch.arange(10), torch.arange(5, 25)).worst == 0
    assert check_overlap(torch.arange(10), torch.arange(5, 8)).worst == 1  # its passages have three tokens
