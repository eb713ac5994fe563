"""The attention variants: small objects with one protocol, each built from its own config dataclass."""

from model.attention.custom import Custom, CustomConfig, load_function
from model.attention.exact import Flash1Config, Flash2, Flash2Config, FusedSoftmaxConfig, NaiveConfig
from model.attention.protocol import Attention, AttentionConfig, split_projection
from model.attention.registry import (
    BUILT_IN,
    EXACT,
    SPARSE_KEYS,
    VARIANTS,
    build_attention,
    check_attention,
    restore_attention,
    unknown_setting,
)
from model.attention.sdpa import SDPA_BACKENDS, Sdpa, SdpaConfig
from model.attention.sparse import BlockSparseConfig, LocalConfig, read_pattern
