"""The report at the end of a sweep. tests/hydra_plugins/test_process_launcher.py tests it after real jobs."""

from omegaconf import OmegaConf

from bench.report.sweep import SweepReport


def test_a_sweep_without_a_finished_run_has_no_report(tmp_path, capsys):
    SweepReport().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    assert capsys.readouterr().out.startswith(f"no report of the sweep: runs={tmp_path} has no metrics.jsonl")
    assert not list(tmp_path.iterdir())
