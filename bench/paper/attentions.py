"""The attentions of the tables by name, from bench.attention, baselines.py and model.attention."""

from bench.attention.accuracy import check, truth_of
from bench.attention.contenders import available, bind, draw_inputs
from bench.attention.shapes import AttentionShape
from bench.common.timing import Gpu
from bench.paper.baselines import BASELINES
from bench.paper.settings import PaperSettings
from errors import UserError
from model.attention import VARIANTS, Attention, AttentionConfig, build_attention


def known(settings: PaperSettings) -> dict[str, Attention]:
    """Return the attentions of bench.attention on this machine and the papers' baselines."""
    return {**available(), **BASELINES}


def attention_named(name: str, settings: PaperSettings) -> Attention:
    """Return the attention of that name. Raise a UserError if the name is unknown."""
    if name in (found := known(settings)):
        return found[name]
    if name not in VARIANTS:
        raise UserError(f"attention {name} is unknown; choose one of {', '.join({**found, **VARIANTS})}")
    return build_attention(configuration(name))


def configuration(name: str) -> AttentionConfig:
    return VARIANTS[name]()


def check_attention(name: str, cell: AttentionShape, gpu: Gpu, settings: PaperSettings) -> None:
    """Compare an attention with the fp64 reference on fresh inputs, and raise WrongResult if the error is too large."""
    data = draw_inputs(cell, gpu.device)
    check(bind(name, attention_named(name, settings), cell, data), cell, truth_of(cell, data))
