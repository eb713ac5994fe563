"""The import graph: no circles, and the directions of the design. A token travels through the code in one direction."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.e2e import ROOT

SCRIPTS = ["train", "evaluate", "replay", "sample", "export"]
MAY_IMPORT = {
    "errors": [],
    "kernels": [],
    "data": ["errors"],
    "model": ["errors", "kernels"],
    "trainer": ["errors", "kernels", "data", "model"],
    "hydra_plugins": ["errors"],
    "conf": ["errors", "data", "model", "trainer", "hydra_plugins"],
    **{script: ["errors", "data", "model", "trainer", "conf", "train"] for script in SCRIPTS},
    "bench": ["errors", "kernels", "data", "model", "trainer", "hydra_plugins", "conf", "train"],
}
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for package in MAY_IMPORT
    for file in ([ROOT / f"{package}.py"] if (ROOT / f"{package}.py").exists() else (ROOT / package).rglob("*.py"))
}


def imports_of(file: Path) -> set[str]:
    """Return the modules of this repository that a file imports, except if it runs as a program or for types."""
    found, pending = set(), list(ast.parse(file.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")):
            pending += ast.iter_child_nodes(node)
    return found & FILES.keys()


GRAPH = {module: imports_of(file) for module, file in FILES.items()}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_packages_before_it(package):
    allowed = {package, *MAY_IMPORT[package]}
    for module in (module for module in GRAPH if module.partition(".")[0] == package):
        wrong = [name for name in GRAPH[module] if name.partition(".")[0] not in allowed]
        assert not wrong, f"{module} imports {wrong}"


def test_no_module_imports_itself_through_others():
    """A package's own __init__ runs before its modules, so an import of the package itself does not count there."""
    graph = {module: {x for x in found if not module.startswith(f"{x}.")} for module, found in GRAPH.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_file_is_longer_than_450_lines():
    files = [*FILES.values(), *(ROOT / "tests").rglob("*.py")]
    long = {str(file.relative_to(ROOT)): n for file in files if (n := len(file.read_text().splitlines())) > 450}
    assert not long


def test_train_py_is_short_and_leaves_failures_to_the_components():
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= 200
    assert not {"agreed", "is_first"} & set(text.replace(".", " ").replace("(", " ").split())
    assert not any(isinstance(node, ast.Try) for node in ast.walk(ast.parse(text)))
