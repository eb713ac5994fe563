"""The files for contributors agree with the project."""

import re
import tomllib

import yaml

from tests.e2e import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_workflow_runs_ci_with_a_supported_python_and_a_time_limit():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    options = next(step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    lowest = PROJECT["requires-python"].removeprefix(">=").split(".")
    assert [int(part) for part in options["python-version"].split(".")] >= [int(part) for part in lowest]
    assert job["steps"][-1] == {"run": ".ci/run"} and job["timeout-minutes"] <= 120


def test_the_hooks_run_the_linters_of_ci():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in local["hooks"]]
    linters = re.findall(r"^(ruff .*) \.$", (ROOT / ".ci/run").read_text(), re.M)
    assert entries == [*linters, "pytest"] and len(linters) == 2


def test_the_citation_has_the_version_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert len(citation["references"]) == 3
