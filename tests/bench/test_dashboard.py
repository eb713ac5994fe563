"""bench.dashboard without an account, and with an account on a fake server."""

import json
import os
import re
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.reports.v2.internal as report_models
import wandb_workspaces.workspaces as ws
import wandb_workspaces.workspaces.internal as workspace_models
import yaml

from bench import dashboard
from bench.dashboard import DashboardSettings
from errors import UserError
from tests.e2e import rows, run
from trainer.meters import ThroughputMeter

pytest_plugins = ["tests.e2e"]

NEEDED = {f"{split}/{name}" for split in ("train", "val") for name in ("loss", "perplexity")}
NEEDED |= {"perf/tokens_per_second", "perf/tflops", "perf/mfu", "memory/peak_allocated_gib"}


def made(page: str, group: str | None = None) -> dict:
    return dashboard.definition(getattr(dashboard, page)("me", "gpt2-flash", group))


def found(tree, key: str) -> list:
    """Return every value of `key` at any depth."""
    if isinstance(tree, list):
        return [value for branch in tree for value in found(branch, key)]
    if isinstance(tree, dict):
        return ([tree[key]] if key in tree else []) + found(list(tree.values()), key)
    return []


def panels_of(tree, kind: str) -> list[dict]:
    panels = [panel for group in found(tree, "panels") if isinstance(group, list) for panel in group]
    return [panel["config"] for panel in panels if panel["viewType"] == kind]


def metrics_of(tree) -> set[str]:
    """Return the metrics that the panels of a page draw."""
    curves, bars = panels_of(tree, "Run History Line Plot"), panels_of(tree, "Bar Chart")
    of_runs = [axis for plot in panels_of(tree, "Scatter Plot") for axis in (plot["xAxis"], plot["yAxis"])]
    drawn = {key for config in curves + bars for key in config["metrics"]} | {plot["xAxis"] for plot in curves}
    return drawn | {axis.removeprefix("summary:") for axis in of_runs if axis.startswith("summary:")}


@pytest.fixture
def logged(trained, monkeypatch) -> set[str]:
    """Return the keys that runs log on a CPU, and those that a meter adds on a GPU with a known peak."""
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 2**30)
    counts = {"tokens_per_step": 1, "flops_per_token": 1, "flops_per_token_causal": 1, "peak_flops": 1.0}
    meter = ThroughputMeter(**counts, device=torch.device("cuda"), waited_s=float)
    meter.step()
    meter.step()
    return {key for row in rows(trained) for key in row} | set(meter.read())


@pytest.mark.parametrize("page", ["workspace", "report"])
def test_runs_log_every_metric_of_a_page_and_the_page_has_every_important_one(page, logged):
    used = metrics_of(made(page))
    assert used <= logged
    assert used >= NEEDED | {"tokens"}


@pytest.mark.parametrize("page", ["workspace", "report"])
def test_runs_are_grouped_by_settings_of_their_configuration(page, trained):
    config = yaml.safe_load((trained / "config.yaml").read_text())
    definition = made(page)
    groupings = found(definition, "grouping")
    # wandb stores a top-level key of a run's config under "value".
    names = ["attention.value.name", "model.value.context_length"]
    assert groupings and all([key["name"] for key in grouping] == names for grouping in groupings)
    assert all(key["section"] == "config" for grouping in groupings for key in grouping)
    assert config["attention"]["name"] == "flash2" and config["model"]["context_length"] == 32
    across = {plot["xAxis"] for plot in panels_of(definition, "Scatter Plot")}
    assert across == {"config:model.value.context_length"}


@pytest.mark.parametrize("page", ["workspace", "report"])
def test_only_the_runs_of_a_group_are_shown_if_one_is_named(page):
    def filters(group):
        return [spec["filters"] for spec in found(made(page, group), "filters") if isinstance(spec, dict)]

    key = {"section": "run", "name": "group"}
    only = [{"key": key, "op": "=", "value": "2026-11-21_10-00-00", "disabled": False}]
    assert filters("2026-11-21_10-00-00") == [only] * len(filters(None))
    assert filters(None) and not any(filters(None))


def test_wandbs_own_models_read_the_definition():
    workspace, report = made("workspace", "a sweep"), made("report", "a sweep")
    view = ws.Workspace._from_model(workspace_models.View.model_validate(workspace))
    page = wr.Report._from_model(report_models.ReportViewspec.model_validate(report))
    kinds = {type(panel) for part in [*view.sections, *page.blocks] for panel in getattr(part, "panels", [])}
    assert kinds == {wr.LinePlot, wr.BarPlot, wr.ScatterPlot, wr.RunComparer}
    assert shape(dashboard.definition(view)) == shape(workspace)
    grids = found(report, "metadata")
    assert len(grids) == 5 and shape(found(dashboard.definition(page), "metadata")) == shape(grids)


def test_panels_of_a_report_do_not_overlap():
    grids = [block for block in dashboard.report("me", "gpt2-flash", None).blocks if isinstance(block, wr.PanelGrid)]
    layouts = [[panel.layout for panel in grid.panels] for grid in grids]
    for one, other in (pair for grid in layouts for pair in combinations(grid, 2)):
        side_by_side = one.x + one.w <= other.x or other.x + other.w <= one.x
        assert side_by_side or one.y + one.h <= other.y or other.y + other.h <= one.y


def test_without_an_account_the_definition_is_written_and_the_remedy_is_printed(tmp_path, monkeypatch):
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    ended = run("bench/dashboard.py", f"out={tmp_path / 'new' / 'a.json'}", "entity=me").ok()
    assert ended.err == ""
    where, why = ended.out.splitlines()
    assert "a.json" in where and "nothing is published: wandb finds no credentials for https://" in why
    assert "`wandb login`" in why and "run this command again" in why
    written = json.loads((tmp_path / "new" / "a.json").read_text())
    assert shape(written) == shape({page: made(page) for page in ("report", "workspace")})


def shape(tree):
    """Return a definition without its identifiers, which are random."""
    if isinstance(tree, dict):
        return {key: shape(value) for key, value in tree.items() if key not in ("id", "__id__")}
    return [shape(branch) for branch in tree] if isinstance(tree, list) else tree


class Server:
    """A fake wandb.Api that records requests and answers like wandb's GraphQL."""

    default_entity = "me"

    def __init__(self):
        self.sent, self.created = [], []
        self.__dict__["_service_api"] = SimpleNamespace(execute_graphql=self.answer, app_url="https://wandb.example")

    def __call__(self):
        return self

    def projects(self, entity):
        return []

    def create_project(self, name, entity):
        self.created.append((entity, name))

    def answer(self, query, variables):
        self.sent.append(variables)
        view = {"id": "7", "name": variables["name"], "displayName": variables["displayName"]}
        project = {"name": variables["projectName"], "entityName": variables["entityName"]}
        return {"upsertView": {"view": view | {"project": project, "spec": variables["spec"]}}}


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setattr(wandb, "Api", server)
    monkeypatch.setattr(dashboard, "server_problem", lambda settings: None)
    return server


def test_with_an_account_the_written_definition_is_uploaded(server, tmp_path, capsys):
    dashboard.run(DashboardSettings(out=str(tmp_path / "a.json")))
    written = json.loads((tmp_path / "a.json").read_text())
    assert [sent["type"] for sent in server.sent] == ["runs", "project-view"]
    assert [json.loads(sent["spec"]) for sent in server.sent] == [written[page]["spec"] for page in written]
    assert all((sent["entityName"], sent["projectName"]) == ("me", "gpt2-flash") for sent in server.sent)
    assert server.created == [("me", "gpt2-flash")]
    _, report, workspace = capsys.readouterr().out.splitlines()
    assert report.startswith("report: https://wandb.example/me/gpt2-flash/reports/")
    assert workspace.startswith("workspace: https://wandb.example/me/gpt2-flash?nw=")


def test_a_refusal_of_wandb_is_one_sentence(server, tmp_path, monkeypatch):
    def refuse(query, variables):
        raise wandb.errors.CommError("permission denied\nwith a long trace")

    server._service_api.execute_graphql = refuse
    settings = DashboardSettings(entity="others", out=str(tmp_path / "a.json"))
    refused = (
        r"entity=others project=gpt2-flash did not take the report \(CommError: permission denied\); check entity="
    )
    with pytest.raises(UserError, match=refused):
        dashboard.run(settings)
    monkeypatch.setattr(Server, "default_entity", None)
    with pytest.raises(UserError, match="entity=null finds no default entity .*; give a user or a team"):
        dashboard.run(DashboardSettings(out=str(tmp_path / "b.json")))
    assert not (tmp_path / "b.json").exists()


def test_a_malformed_key_is_one_sentence(tmp_path, monkeypatch):
    def problem(settings):
        raise wandb.errors.AuthenticationError("WANDB_API_KEY invalid: it has 5 characters")

    monkeypatch.setattr(dashboard, "server_problem", problem)
    refused = r"wandb does not start \(AuthenticationError: WANDB_API_KEY invalid: .*\); correct WANDB_API_KEY and"
    with pytest.raises(UserError, match=refused):
        dashboard.run(DashboardSettings(out=str(tmp_path / "a.json")))


@pytest.mark.parametrize("sign", "'\\<=>")
def test_a_group_that_wandbs_filters_misread_is_refused(sign):
    with pytest.raises(UserError, match=f"^group=lr{re.escape(sign)}1 contains one of"):
        DashboardSettings(group=f"lr{sign}1")


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out=.*file/new/a\.json cannot be written"):
        DashboardSettings(out=str(tmp_path / "file" / "new" / "a.json"))
    with pytest.raises(UserError, match=f"out={tmp_path} is a folder"):
        DashboardSettings(out=str(tmp_path))
