"""The attentions of the tables by name: those of bench.attention, baselines.py, and what a model is trained with."""

from omegaconf import OmegaConf

from bench.attention.accuracy import check, truth_of
from bench.attention.contenders import available, bind, draw
from bench.attention.shapes import Cell
from bench.common.results import ROOT
from bench.common.timing import Gpu
from bench.paper.baselines import BASELINES
from bench.paper.config import PaperConfig
from errors import UserError
from model.attention import VARIANTS, Attention, AttentionConfig, build_attention


def known(config: PaperConfig) -> dict[str, Attention]:
    """What this machine has from elsewhere, the papers' own baselines, and of ours what is not among them."""
    return {**available(config.fa3_library), **BASELINES}


def attend(variant: str, config: PaperConfig) -> Attention:
    """The attention of that name.

    Raises:
        UserError: there is none.
    """
    if variant in (theirs := known(config)):
        return theirs[variant]
    if variant not in VARIANTS:
        raise UserError(f"there is no attention {variant}; there are {', '.join({**theirs, **VARIANTS})}")
    return build_attention(settings(variant))


def settings(variant: str) -> AttentionConfig:
    """Those that conf/attention has for it."""
    return AttentionConfig(**OmegaConf.load(ROOT / "conf" / "attention" / f"{variant}.yaml"))


def check_variant(variant: str, cell: Cell, gpu: Gpu, config: PaperConfig) -> None:
    """Holds an attention to the fp64 reference on fresh inputs.

    Raises:
        WrongResult: it is off by more than is allowed.
    """
    data = draw(cell, gpu.device)
    check(bind(variant, attend(variant, config), cell, data), cell, truth_of(cell, data))
