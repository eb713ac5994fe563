"""Which package may import which: a token's way through the code has one direction."""

import ast

import pytest

from tests.e2e import ROOT

OURS = {"bench", "conf", "data", "kernels", "model", "trainer"}
MAY_IMPORT = {
    "kernels": {"kernels"},
    "model": {"kernels", "model"},
    "data": {"data"},
    "trainer": {"data", "kernels", "model", "trainer"},
}


def imported(tree: ast.Module) -> set[str]:
    """The packages that a module imports, but for what is imported for its types or when it is the program."""
    found, pending = set(), list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")):
            pending += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_none_that_comes_after_it(package):
    for file in (ROOT / package).rglob("*.py"):
        late = (imported(ast.parse(file.read_text())) & OURS) - MAY_IMPORT[package]
        assert not late, f"{file.relative_to(ROOT)} imports {', '.join(late)}"
