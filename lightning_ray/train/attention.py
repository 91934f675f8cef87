"""Attention over rows that hold several samples: a token sees itself and its sample's front.

Importing this registers `ROWS` with transformers. It computes a row sample by sample, so that
nothing is spent on what a token does not see. On CUDA devices `blocks` has FlexAttention do so for
trees, whose samples are many small spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_ray.errors import ConfigError

ROWS = "lightning_ray_rows"
_UNKNOWN = "s_aux", "softcap", "position_bias"


@dataclass(frozen=True)
class Span:
    """Tokens of a row that follow each other in a sample."""

    row: int
    start: int
    stop: int
    front: torch.Tensor
    """[P] int64, where in the row the tokens before them in their sample are."""


def is_plain(ends: torch.Tensor) -> bool:
    """Whether each row holds one sample, and then padding; ends: [B, T] as in `Batch`."""
    filled = ends > 0
    return bool((ends == filled * filled.sum(-1, keepdim=True)).all())


def spans(ends: torch.Tensor) -> list[Span]:
    """The spans of rows, in order; ends: [B, T]."""
    found = []
    for row, line in enumerate(ends.cpu()):
        length = int((line > 0).sum())
        places = torch.arange(length)
        is_last = line[:length] == places + 1  # the token after it goes on from elsewhere
        stops = (places[is_last] + 1).tolist()
        for start, stop in pairwise([0, *stops]):
            front = torch.nonzero(line[:start] > start).flatten().to(ends.device)
            found.append(Span(row, start, stop, front))
    return found


def blocks(ends: torch.Tensor) -> Any:
    """The same for FlexAttention, which leaves out the blocks of a row where nothing is seen."""
    num_rows, width = ends.shape

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((k <= q) & (q < ends[b, k])) | (q == k)

    return create_block_mask(sees, num_rows, None, width, width, device=str(ends.device))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    row_spans: list[Span] | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; `row_spans` None: plain rows, as the model has it.

    query: [B, H, T, D]; key, value: [B, G, T, D], each head of them for H / G of the query's.
    Returns [B, T, H, D], 0.0 at padding.
    """
    if any(more.get(name) is not None for name in _UNKNOWN):
        raise ConfigError(
            f"train.layout=packed and tree know no attention with {' or '.join(_UNKNOWN)}, which "
            "this model has; set train.layout=padded"
        )
    if row_spans is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )
    num_groups = query.shape[1] // key.shape[1]
    parts = [query.new_zeros(0, query.shape[1], query.shape[3])]
    where = []
    for span in row_spans:
        own = slice(span.start, span.stop)
        q, k, v = query[span.row, None, :, own], key[span.row, None], value[span.row, None]
        if not len(span.front):
            seen = scaled_dot_product_attention(
                q, k[:, :, own], v[:, :, own], is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            own_places = torch.arange(span.start, span.stop, device=query.device)
            path = torch.cat([span.front, own_places])
            reach = torch.arange(len(span.front), len(path), device=query.device)[:, None]
            mask = torch.arange(len(path), device=query.device) <= reach
            k, v = repeat_kv(k[:, :, path], num_groups), repeat_kv(v[:, :, path], num_groups)
            seen = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        parts.append(seen[0].transpose(0, 1))
        where.append(torch.arange(span.start, span.stop) + span.row * query.shape[2])
    num_rows, heads, width, size = query.shape
    out = query.new_zeros(num_rows * width, heads, size)
    out = out.index_copy(0, torch.cat(where).to(query.device), torch.cat(parts))
    return out.view(num_rows, width, heads, size), None


AttentionInterface.register(ROWS, attend)
AttentionMaskInterface.register(ROWS, sdpa_mask)
