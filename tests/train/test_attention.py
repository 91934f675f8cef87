"""In a row of several samples a token sees itself and its sample's front, by every way there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from lightning_ray.errors import ConfigError
from lightning_ray.train.attention import attend, blocks, is_plain, spans
from lightning_ray.train.batch import pack
from tests.train.samples import siblings

PACKED = [[2, 2, 4, 4, 0]]
TREE = [[4, 3, 3, 4]]  # 0 -> 1 -> 2 and 0 -> 3


def visible(ends: torch.Tensor) -> torch.Tensor:
    """[B, T, T] what sees what, by definition."""
    places = torch.arange(ends.shape[1])
    is_before, is_open = places[None, :] <= places[:, None], places[:, None] < ends[:, None, :]
    return (is_before & is_open) | (places[None, :] == places[:, None])


def test_a_token_sees_its_own_sample_and_its_ancestors() -> None:
    assert visible(torch.tensor(PACKED))[0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1],
    ]  # fmt: skip
    assert visible(torch.tensor(TREE))[0].int().tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1],
    ]  # fmt: skip


def test_spans_are_what_a_sample_adds() -> None:
    def found(ends: list[list[int]]) -> list[tuple[int, int, list[int]]]:
        return [(span.start, span.stop, span.front.tolist()) for span in spans(torch.tensor(ends))]

    assert found(PACKED) == [(0, 2, []), (2, 4, [])]
    assert found(TREE) == [(0, 3, []), (3, 4, [0])]
    assert found([[0, 0]]) == []


def test_rows_of_one_sample_are_plain() -> None:
    assert is_plain(torch.tensor([[3, 3, 3, 0], [4, 4, 4, 4], [0, 0, 0, 0]]))
    assert not is_plain(torch.tensor(PACKED))
    assert not is_plain(torch.tensor(TREE))


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_every_way_of_attending_sees_the_same(layout: str) -> None:
    rng = np.random.default_rng(0)
    samples = siblings(16, rng)
    batch, *_ = pack(
        samples, advantages={s.rollout_id: 1.0 for s in samples}, version=0, tokens_per_batch=9999,
        layout=layout,
    )  # fmt: skip
    ends = torch.from_numpy(batch.ends)
    assert not is_plain(ends)
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*ends.shape, n, 16, generator=chance).transpose(1, 2) for n in (4, 2, 2))
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible(ends)[:, None], enable_gqa=True
    )
    module: Any = SimpleNamespace(num_key_value_groups=2)
    by_spans, _ = attend(module, q, k, v, None, row_spans=spans(ends))
    by_blocks = flex_attention(q, k, v, block_mask=blocks(ends), enable_gqa=True)
    filled = ends > 0
    torch.testing.assert_close(by_spans[filled], dense.transpose(1, 2)[filled])
    assert not by_spans[~filled].any()
    torch.testing.assert_close(by_blocks, dense, atol=1e-6, rtol=1e-5)


def test_attention_of_another_kind_is_refused() -> None:
    q = k = v = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ConfigError, match=r"softcap.*set train.layout=padded"):
        attend(torch.nn.Module(), q, k, v, None, softcap=50.0)
