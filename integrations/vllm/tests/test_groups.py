"""Groups of tokens whose experts fit: each token once, no group too wide, what is held first."""

import torch
from expertcast_vllm.step import groups


def test_each_token_is_in_one_group_whose_experts_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    for limit in (4, 5, 9, 31):
        ids_TK = torch.rand(200, 32, generator=generator).topk(4, dim=1).indices
        parts = list(groups(ids_TK, 32, limit))
        assert torch.cat(parts).sort().values.tolist() == list(range(200))
        assert all(len(ids_TK[rows].unique()) <= limit for rows in parts)


def test_tokens_that_share_experts_share_a_group() -> None:
    ids_TK = torch.tensor([[0, 1], [2, 3]] * 50)
    assert [len(rows) for rows in groups(ids_TK, 8, 2)] == [50, 50]


def test_the_first_group_is_of_held_experts() -> None:
    ids_TK = torch.tensor([[0, 1], [0, 1], [6, 7]])
    assert next(groups(ids_TK, 8, 2)).tolist() == [0, 1]
    assert next(groups(ids_TK, 8, 2, held=[6, 7])).tolist() == [2]


def test_one_step_that_fits_is_one_group() -> None:
    ids_TK = torch.tensor([[0, 1], [2, 3], [3, 0]])
    (rows,) = groups(ids_TK.int(), 4, 4)
    assert rows.tolist() == [0, 1, 2]
