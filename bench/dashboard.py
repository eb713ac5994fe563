"""Runs side by side in wandb, as a workspace and as a report: python -m bench.dashboard --help.

The runs of a project, grouped by attention and then by context length: loss and perplexity, speed and memory over
tokens, and what they came to against context length. The definition, in wandb's own format, is written to a file; where
there is an account it is published as well, each time as a new workspace and a new report.
"""

import argparse
from pathlib import Path

import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb_workspaces.reports.v2.interface import Panel

from bench.common.command_line import output_file
from bench.common.results import write
from errors import UserError, described, refusing
from trainer.loggers import WandbConfig, server_problem

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
# Perplexity falls by orders of magnitude.
LOGARITHMIC = ("val/perplexity", "train/perplexity")


def panels() -> dict[str, list[Panel]]:
    """The panels of a workspace or a report, by section; each call makes new ones, for a panel belongs to one page."""
    return {
        "Loss and perplexity over tokens": [curve(key, title) for key, title in LEARNING.items()],
        "Speed and memory over tokens": [curve(key, title) for key, title in COST.items()],
        "By attention and context length": [
            wr.BarPlot(title=f"{title}: last value", metrics=[key]) for key, title in last_values().items()
        ],
        "Over context length": [over_context(key, title) for key, title in last_values().items()],
        "Settings that differ": [wr.RunComparer(diff_only="split", layout=wr.Layout(w=24, h=12))],
    }


def curve(key: str, title: str) -> wr.LinePlot:
    """A metric over the tokens trained on."""
    return wr.LinePlot(title=title, x="tokens", y=[key], log_y=True if key in LOGARITHMIC else None)


def over_context(key: str, title: str) -> wr.ScatterPlot:
    """The last value of a metric, one point for each attention and context length."""
    x, y = wr.Config("model.context_length"), wr.SummaryMetric(key)
    return wr.ScatterPlot(title=f"{title}: last value over context length", x=x, y=y, log_x=True)


def last_values() -> dict[str, str]:
    """Metrics, and their titles, of which the value at the end of a run tells how it went."""
    return {key: LEARNING[key] for key in ("val/loss", "val/perplexity")} | COST


def workspace(entity: str, project: str, group: str | None) -> ws.Workspace:
    """The workspace that compares the runs of a project, or of one group of them."""
    return ws.Workspace(
        name=TITLE,
        entity=entity,
        project=project,
        sections=[section(name, drawn) for name, drawn in panels().items()],
        settings=ws.WorkspaceSettings(x_axis="tokens"),
        runset_settings=ws.RunsetSettings(groupby=[ws.Config(key) for key in GROUPS], filters=only(group)),
    )


def section(name: str, drawn: list[Panel]) -> ws.Section:
    """Panels side by side, three to a row."""
    columns = ws.SectionLayoutSettings(columns=min(len(drawn), 3))
    return ws.Section(name=name, panels=drawn, is_open=True, layout_settings=columns)


def report(entity: str, project: str, group: str | None) -> wr.Report:
    """The same as a page with a few words."""
    blocks = [wr.P("Runs are grouped by attention and then by context length; a line or a bar is a group's mean.")]
    for name, drawn in panels().items():
        # A run set that names no project is that of the report.
        runs = wr.Runset(groupby=[f"config.{key}" for key in GROUPS], filters=only(group))
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runs], panels=drawn)]
    return wr.Report(title=TITLE, entity=entity, project=project, blocks=blocks, width="fluid")


def only(group: str | None) -> ws.And | str:
    """The filter that leaves the runs of a group; for None the empty one."""
    return "" if group is None else ws.And(ws.Metric("Group") == group)


def definition(page: ws.Workspace | wr.Report) -> dict:
    """What the library uploads for a page, as plain values."""
    return page._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def publish(pages: list[wr.Report | ws.Workspace]) -> None:
    """Saves pages in wandb and prints their addresses.

    Raises:
        UserError: wandb refuses.
    """
    for page in pages:
        try:
            page.save()
        except Exception as error:  # of many kinds: GraphQL's, the network's, wandb's and the library's own
            raise UserError(
                f"wandb did not take the {type(page).__name__.lower()} for {page.entity}/{page.project} "
                f"({described(error)}); check --entity and --project, and the account with `wandb login --relogin`"
            ) from error
        print(f"{type(page).__name__.lower()}: {page.url}")


def default_entity() -> str:
    """The user or team that the account's runs belong to.

    Raises:
        UserError: the account is refused or has none.
    """
    try:
        entity = wandb.Api().default_entity
    except Exception as error:
        raise UserError(f"wandb refuses the account ({described(error)}); run `wandb login --relogin`") from error
    if not entity:
        raise UserError("this wandb account has no default entity; name a user or a team with --entity")
    return entity


def group_name(text: str) -> str:
    """The name of a group, for argparse: the library's filters take some signs in it for their own."""
    if set(text) & set("'\\<=>"):
        raise argparse.ArgumentTypeError(
            f"{text} holds one of ' \\ < = >, which wandb's filters garble; leave --group out"
        )
    return text


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.dashboard",
        description="Compares the runs of a wandb project in a workspace and a report.",
        epilog="Offline runs get there by: wandb sync outputs/*/wandb/offline-run-* multirun/*/*/wandb/offline-run-*",
    )
    add = parser.add_argument
    add("--project", default=WandbConfig.project, help=f"wandb.project of the runs ({WandbConfig.project})")
    add("--entity", help="user or team that owns it; the account's own by default")
    add("--group", type=group_name, help="only the runs of this wandb.group: for a sweep, its folder's name")
    out = Path("outputs/dashboard.json")
    add("--out", type=output_file, default=out, help=f"file for the definition, as JSON ({out})")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    """Writes the definition, and publishes it or says why not.

    Raises:
        UserError: there is an account, and wandb refuses what it is asked.
    """
    problem = server_problem(wandb.Settings(silent=True))
    entity = arguments.entity or ("" if problem else default_entity())
    # The report first: it creates a project that is not there yet.
    pages = [make(entity, arguments.project, arguments.group) for make in (report, workspace)]
    write(arguments.out, {type(page).__name__.lower(): definition(page) for page in pages})
    print(f"{arguments.out} holds the definition of a report and a workspace for project {arguments.project}")
    if problem:
        return print(f"nothing is published: wandb finds {problem}, and then run this command again")
    publish(pages)


def main() -> None:
    with refusing():
        run(parse())


if __name__ == "__main__":
    main()
