"""The attention variants: small objects with one protocol, each built from its own config dataclass."""

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from errors import UserError, is_out_of_memory
from model.attention.custom import Custom, CustomConfig, Fa2Config, Fa3Config, Fa4Config, FlexConfig, load_function
from model.attention.exact import (
    SDPA_BACKENDS,
    Flash1Config,
    Flash2,
    Flash2Config,
    FusedSoftmaxConfig,
    NaiveConfig,
    Sdpa,
    SdpaConfig,
)
from model.attention.protocol import Attention, AttentionConfig, kind_of, split_projection
from model.attention.sparse import BlockSparseConfig, LocalConfig, restore_pattern

_EXACT = NaiveConfig, SdpaConfig, FusedSoftmaxConfig, Flash1Config, Flash2Config
_OTHERS = LocalConfig, BlockSparseConfig, CustomConfig, FlexConfig, Fa2Config, Fa3Config, Fa4Config
VARIANTS: dict[str, type[AttentionConfig]] = {config.name: config for config in (*_EXACT, *_OTHERS)}
"""The config class of each variant, by name."""
EXACT = tuple(config.name for config in _EXACT)
"""The variants that run everywhere and compute all pairs, so that all give the same result."""
SPARSE_KEYS = {"window": "local", "pattern": "block_sparse"}
"""The settings that say which pairs are left out, and the variant of each."""
BUILT_IN = *EXACT, *SPARSE_KEYS.values()
"""The variants that run everywhere."""
MOST_TOKENS = 1024  # of the sequence that check_attention tries


def build_attention(config: AttentionConfig) -> Attention:
    """Return the variant that `config` describes."""
    return config.build()


def restore_attention(recorded: Mapping[str, object], function: str | None) -> AttentionConfig:
    """Return the attention of a recorded run, from the settings in its record.

    A record must not name code to import. For attention=custom, the command line has to give the same `function`.
    """
    config = VARIANTS.get(recorded["name"])
    if config is None:
        raise UserError(
            f"attention={recorded['name']} of the record is unknown to this version; use the version that wrote the "
            "record"
        )
    own = config(**{field.name: recorded[field.name] for field in fields(config) if field.name in recorded})
    if isinstance(own, CustomConfig) and own.function != function:
        raise UserError(
            f"function={function} is not the run's {own.function}; give function={own.function}, because a record must "
            "not name code to import"
        )
    return own


def unknown_setting(name: str, key: str) -> str:
    """Return the message for a setting that the variant `name` does not have."""
    settings = {variant: [f.name for f in fields(config) if f.name != "name"] for variant, config in VARIANTS.items()}
    own = ", ".join(f"attention.{setting}" for setting in settings[name]) or "no settings"
    owners = ", ".join(f"attention={variant}" for variant in VARIANTS if key in settings[variant])
    remedy = f"use it with {owners}" if owners else "leave it out"
    return f"attention.{key} is not a setting of attention={name}, which has {own}; {remedy}"


def check_attention(
    config: AttentionConfig,
    *,
    head_dim: int,
    dtype: torch.dtype,
    dropout_p: float,
    device: torch.device,
    context_length: int,
    groups: int = 1,
    documents: bool = False,
    sampling: bool = False,
) -> None:
    """Run the variant on one sequence, to find out before training what it cannot do.

    `groups` is the number of query heads that share a head of keys and values. The sequence has `context_length`
    tokens, but at most MOST_TOKENS. The variant runs forward and backward, and if `sampling` is asked for, once with a
    single query.
    """
    attention = build_attention(config)
    attention.check_length(context_length)
    _check_options(config, attention, device, dropout_p, documents)
    heads, kv_heads, length = 2 * groups, 2, min(context_length, MOST_TOKENS)
    packed = torch.randn(1, length, (heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype, requires_grad=True)
    options = {"causal": True, "scale": 1.0}
    if documents:
        cuts = [0, length - length // 2, length, length]  # with an empty document, as batches have at their end
        options["cu_seqlens"] = torch.tensor(cuts, dtype=torch.int32, device=device)
    shared = f"{groups} query heads per key head, " if groups > 1 else ""
    task = (
        f"run on {device.type} with head_dim {head_dim}, {shared}{dtype}, dropout {dropout_p} and "
        f"data.document_mask={str(documents).lower()}"
    )
    remedy = attention.remedy
    if groups > 1 and config.name not in BUILT_IN:  # the built-in variants all share heads
        remedy += ", such as naive, sdpa or flash2, or set model.n_kv_head=null"
    try:
        _train_once(attention, split_projection(packed, heads, kv_heads), dropout_p=dropout_p, **options)
        attention.check_results(*split_projection(packed, heads, kv_heads), **options)
        if sampling:
            keys = max(length - 1, 1)  # Samples have any number of keys.
            task = f"sample with one query, {keys} keys and causal=False"
            remedy += ", or train with train.sample_tokens=0"
            q, k, v = split_projection(packed.detach(), heads, kv_heads)
            _run_once(attention, q[:, -1:], k[:, :keys], v[:, :keys], causal=False, scale=1.0)
    except attention.refusals as error:
        if is_out_of_memory(error):  # the remedies are others
            raise
        raise UserError(f"{config} cannot {task} ({attention.explain(error)}); {remedy}") from error


def _check_options(
    config: AttentionConfig, attention: Attention, device: torch.device, dropout_p: float, documents: bool
) -> None:
    """Refuse a device or an option that the variant says it does not support."""
    if device.type == "cpu" and not attention.runs_on_cpu:
        raise UserError(f"{config} does not run on a CPU; use attention=flash2 or set device=cuda")
    asked = [("dropout_p", dropout_p, "model.dropout=0"), ("cu_seqlens", documents, "data.document_mask=false")]
    for keyword, is_asked, remedy in asked:
        if is_asked and keyword not in attention.keywords:
            raise UserError(f"{config} does not accept {keyword}; set {remedy} or use attention=flash2")


def _train_once(attention: Attention, inputs: tuple[Tensor, Tensor, Tensor], **options) -> None:
    """Run forward and backward; raise a ValueError if q, k or v gets no gradient."""
    for x in inputs:
        x.retain_grad()
    out = _run_once(attention, *inputs, **options)
    if not out.requires_grad:
        raise ValueError("the output has no gradient; wrap a kernel in torch.autograd.Function")
    out.backward(torch.ones_like(out))
    if missing := [name for name, x in zip("qkv", inputs, strict=True) if x.grad is None]:
        raise ValueError(f"the output has no gradient for {missing[0]}; return one from the backward pass")


def _run_once(attention: Attention, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    out = attention(q, k, v, **options)
    if (found := kind_of(out)) != (expected := kind_of(q)):
        raise ValueError(f"the output is {found} and should be {expected}")
    return out
