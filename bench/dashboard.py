"""Compare the runs of a wandb project in a workspace and a report.

Both group the runs by attention and context length. They show loss, perplexity, speed and memory over tokens, and the
last values over the context length. The definition is written to a file. With a wandb account it is also published,
each time as a new workspace and a new report.

Offline runs must be uploaded first:
  wandb sync outputs/*/wandb/offline-run-* multirun/*/*/wandb/offline-run-*
"""

from dataclasses import dataclass
from pathlib import Path

import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces.reports.v2.interface import Panel

from bench.common.command_line import check_output_file, launch
from bench.common.results import write
from errors import UserError, described
from trainer.loggers import WandbConfig, complete, server_problem

GROUPS = ("attention.name", "model.context_length")
TITLE = "Attention variants"
LEARNING = {
    "val/loss": "validation loss, nats a token",
    "train/loss": "training loss, nats a token",
    "val/perplexity": "validation perplexity",
    "train/perplexity": "training perplexity",
}
COST = {
    "perf/tokens_per_second": "tokens/s",
    "perf/tflops": "TFLOP/s of one device",
    "perf/mfu": "MFU",
    "memory/peak_allocated_gib": "peak GPU memory, GiB",
}


@dataclass
class DashboardSettings:
    """Which runs to compare."""

    project: str | None = None
    """wandb.project of the runs; by default WANDB_PROJECT, or gpt2-flash."""
    entity: str | None = None
    """User or team that owns the project; by default WANDB_ENTITY, or the account's default."""
    group: str | None = None
    """Only the runs of this wandb.group; for a sweep, the name of its folder."""
    out: str = "outputs/dashboard.json"
    """File for the definition, as JSON."""

    def __post_init__(self):
        check_output_file("out", self.out)
        config, _ = complete(WandbConfig(project=self.project, entity=self.entity), {})
        self.project, self.entity = config.project, config.entity
        if set(self.group or "") & set("'\\<=>"):
            raise UserError(f"group={self.group} contains one of ' \\ < = >, which wandb's filters misread; omit group")


def panels() -> dict[str, list[Panel]]:
    """Return the panels by section. Each call makes new panels, because a panel belongs to one page."""

    def curves(metrics: dict[str, str]) -> list[Panel]:
        log = {key: True for key in metrics if "perplexity" in key}  # it falls by orders of magnitude
        return [wr.LinePlot(title=title, x="tokens", y=[key], log_y=log.get(key)) for key, title in metrics.items()]

    last = {key: LEARNING[key] for key in ("val/loss", "val/perplexity")} | COST
    bars = [wr.BarPlot(title=f"{title}: last value", metrics=[key]) for key, title in last.items()]
    x = wr.Config("model.context_length")
    points = [
        wr.ScatterPlot(title=f"{title}: last value over context length", x=x, y=wr.SummaryMetric(key), log_x=True)
        for key, title in last.items()
    ]
    return {
        "Loss and perplexity over tokens": curves(LEARNING),
        "Speed and memory over tokens": curves(COST),
        "By attention and context length": bars,
        "Over context length": points,
        "Settings that differ": [wr.RunComparer(diff_only="split", layout=wr.Layout(w=24, h=12))],
    }


def workspace(entity: str, project: str, group: str | None) -> ws.Workspace:
    """Return the workspace that compares the runs of a project, or of one group in it."""
    sections = []
    for name, drawn in panels().items():
        columns = ws.SectionLayoutSettings(columns=min(len(drawn), 3))
        sections.append(ws.Section(name=name, panels=drawn, is_open=True, layout_settings=columns))
    runs = ws.RunsetSettings(groupby=[ws.Config(key) for key in GROUPS], filters=only(group))
    settings = ws.WorkspaceSettings(x_axis="tokens")
    return ws.Workspace(
        name=TITLE, entity=entity, project=project, sections=sections, settings=settings, runset_settings=runs
    )


def report(entity: str, project: str, group: str | None) -> wr.Report:
    blocks = [wr.P("Runs are grouped by attention and then by context length; a line or a bar is a group's mean.")]
    for name, drawn in panels().items():
        # A run set without a project uses the project of the report.
        runs = wr.Runset(groupby=[f"config.{key}" for key in GROUPS], filters=only(group))
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runs], panels=drawn)]
    return wr.Report(title=TITLE, entity=entity, project=project, blocks=blocks, width="fluid")


def only(group: str | None) -> ws.And | str:
    """Return the filter for the runs of a group; for None, the empty filter."""
    return "" if group is None else ws.And(ws.Metric("Group") == group)


def definition(page: ws.Workspace | wr.Report) -> dict:
    """Return the data that the library uploads for a page, as plain values."""
    return page._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def publish(pages: list[wr.Report | ws.Workspace]) -> None:
    for page in pages:
        try:
            page.save()
        except Exception as error:  # GraphQL, the network, wandb and the library raise different types
            raise UserError(
                f"entity={page.entity} project={page.project} did not take the {type(page).__name__.lower()} "
                f"({described(error)}); check entity= and project=, or change the account with `wandb login --relogin`"
            ) from error
        print(f"{type(page).__name__.lower()}: {page.url}")


def default_entity() -> str:
    try:
        entity = wandb.Api().default_entity
    except Exception as error:
        raise UserError(f"wandb refuses the account ({described(error)}); run `wandb login --relogin`") from error
    if not entity:
        raise UserError("entity=null finds no default entity of the wandb account; give a user or a team, entity=NAME")
    return entity


def run(settings: DashboardSettings) -> None:
    """Write the definition and publish it, or print why it is not published."""
    try:
        problem = server_problem(wandb.Settings(silent=True))
    except Exception as error:  # a malformed key or address; wandb raises many types
        raise UserError(
            f"wandb does not start ({described(error)}); correct WANDB_API_KEY and WANDB_BASE_URL, or run `wandb login`"
        ) from error
    entity = settings.entity or ("" if problem else default_entity())
    # The report comes first, because saving it creates a missing project.
    pages = [make(entity, settings.project, settings.group) for make in (report, workspace)]
    write(Path(settings.out), {type(page).__name__.lower(): definition(page) for page in pages})
    print(f"{settings.out} holds the definition of a report and a workspace for project {settings.project}")
    if problem:
        print(f"nothing is published: wandb finds {problem}, and then run this command again")
    else:
        publish(pages)


if __name__ == "__main__":
    launch(run, DashboardSettings)
