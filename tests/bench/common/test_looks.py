"""One look for each variant in all charts."""

import re

from bench.attention.contenders import LIBRARIES, available
from bench.common.looks import LOOKS, OTHERS, looks_of
from model.attention import VARIANTS


def test_every_variant_has_a_look():
    assert {*available(), *VARIANTS, *LIBRARIES} - {"custom"} <= set(LOOKS)


def test_no_two_variants_share_a_colour_except_sdpa_and_its_backend():
    colours = [look.colour for name, look in LOOKS.items() if name != "sdpa"] + list(OTHERS)
    assert len(set(colours)) == len(colours) and all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_functions_of_the_user_come_last_with_colours_of_their_own():
    names = ["my:slow", "flash2", "my:fast", "naive", "my:slow"]
    looks = looks_of(names)
    assert list(looks) == ["naive", "flash2", "my:slow", "my:fast"]
    assert looks["flash2"] == LOOKS["flash2"]
    assert looks["my:slow"] == ("my:slow", OTHERS[0]) and looks["my:fast"] == ("my:fast", OTHERS[1])
    assert looks_of(["my:fast"])["my:fast"].colour == OTHERS[0]
