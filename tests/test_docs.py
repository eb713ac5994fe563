"""README.md and docs/: the links resolve, and the commands compose."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from conf import cli, schema
from tests.e2e import write_tokens

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in [link for link in links if not link.startswith("https://")]:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_can_be_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop().resolve()
        if page not in reached:
            reached.add(page)
            left += [page.parent / path for path in re.findall(r"\]\(([\w/.-]+\.md)", page.read_text())]
    assert {page.resolve() for page in PAGES} - reached == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_in_code_marks_exists(page):
    for path in re.findall(
        r"`((?:bench|conf|data|docs|kernels|model|trainer|tests)/[\w./]+\.(?:py|md|json|yaml))`", page.read_text()
    ):
        assert (ROOT / path).exists() or "mine." in path, path  # mine: a name that the page makes up


def test_the_explanation_quotes_the_kernels_as_they_are():
    def statements(code: str) -> list[str]:
        return [line for text in code.splitlines() if (line := text.partition("#")[0].strip())]

    page = (ROOT / "docs" / "how-attention-works.md").read_text()
    quoted = statements("".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)))
    written = {line for file in (ROOT / "kernels").rglob("*.py") for line in statements(file.read_text())}
    assert quoted and [line for line in quoted if line not in written] == []


def commands() -> list[str]:
    """Return the commands of all pages that start a program of ours, without comments and a shell's operators."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) + re.findall(r"^(?: {4}.*\n)+", text, re.M)
        for line in "\n".join(blocks).splitlines():
            parts = re.split(r"&&|;|& ", re.sub(r"\s#.*", "", line.strip()))
            found += [part.strip().removeprefix("srun ") for part in parts]
    return list(dict.fromkeys(part for part in found if re.match(r"(python|torchrun) ", part)))


def without_launcher(words: list[str]) -> list[str]:
    """Return the words from the script on, with one value of each sweep."""
    start = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "-m")
    words = [word for word in words[start:] if word not in ("...", "-m")]
    return [words[0], *(re.sub(r"^(\w[\w./]*=[\w.-]+),[\w.,-]+$", r"\1", word) for word in words[1:])]


CONFIGS = {"train.py": "config", "data.prepare": "prepare", "data.inspect": "inspect"}


@pytest.mark.parametrize("command", [command for command in commands() if " -m venv" not in command])
def test_a_command_composes(command, monkeypatch, tmp_path):
    program, *arguments = without_launcher(shlex.split(command.replace("$REPO/", "")))
    if "--help" in arguments or program == "kernels.reference":
        return
    if program.startswith("bench."):
        compose_benchmark(program, arguments, monkeypatch, tmp_path)
        return
    schema.register()
    overrides = [word for word in arguments if not word.startswith(("hydra", "--", "prompt="))]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cli.to_typed(compose(CONFIGS.get(program, program.removesuffix(".py")), overrides))


NANOGPT = """batch_size block_size n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2
    grad_clip decay_lr warmup_iters lr_decay_iters min_lr eval_interval eval_iters log_interval eval_only
    always_save_checkpoint init_from gradient_accumulation_steps dataset out_dir wandb_log wandb_project wandb_run_name
    backend device dtype compile"""


def test_the_map_has_each_setting_of_nanogpt_and_ours_compose():
    text = (ROOT / "docs" / "from-nanogpt.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M))
    assert sorted(rows) == sorted(re.findall(r"\w+", NANOGPT))
    schema.register()
    for key, row in rows.items():
        ours, _, remarks = row.partition(" | ")
        assert ours == "-" or "=" in ours, key
        also = re.findall(r"`((?:train|checkpoint|data|precision)\b[^`]*=[^`]*)`", remarks)
        for settings in [*re.findall(r"`(.*?)`", ours), *also]:
            with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
                cli.to_typed(compose("config", ["model=gpt2", *settings.split()]))


def compose_benchmark(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Start a program of bench/, up to the call of its function."""
    write_tokens(folder / "tokens" / "mine")
    launch, composed = cli.launch, []
    monkeypatch.setattr(cli, "launch", lambda run, *args, **kwargs: launch(composed.append, *args, **kwargs))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.chdir(folder)
    GlobalHydra.instance().clear()
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    assert len(composed) == 1
