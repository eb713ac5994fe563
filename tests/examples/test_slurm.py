"""The sbatch files, with commands in place of Slurm's that start everything on this machine."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e import ROOT, TINY, curve, python_path, wait_for_step, write_tokens
from trainer.checkpoint.load import load as load_checkpoint

pytest_plugins = ["tests.e2e"]

FOLDER = ROOT / "examples" / "slurm"
COMMANDS = {
    # This machine has no 8 GPUs. The repository's root is not the current folder here.
    "torchrun": f"""
        words=()
        for word; do
            [[ $word != --nproc_per_node=8 ]] || word=--nproc_per_node=$PER_NODE
            [[ $word != train.py ]] || word={ROOT}/train.py
            words+=("$word")
        done
        exec {sys.executable} -m torch.distributed.run "${{words[@]}}"
        """,
    "srun": """
        [[ $1 == --kill-on-bad-exit=0 ]] && shift
        for node in 1 2; do "$@" & echo $! >> launchers; done
        code=0
        for launcher in $(cat launchers); do wait $launcher || code=$?; done
        exit $code
        """,
    "scancel": '[[ $* == "--signal=TERM $SLURM_JOB_ID" ]] && kill -TERM $(cat launchers)',
    "scontrol": """
        case "$*" in
            "show hostnames node[1-2]") printf "localhost\\nnode2\\n" ;;
            *) echo "$@" >> queued ;;
        esac
        """,
}


def job_with_free_port() -> str:
    """Return the id of a job whose port, which two-nodes.sbatch derives from it, is free."""
    for port in range(20000 + os.getpid() % 9000, 30000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("localhost", port))
            return str(port - 20000)
    raise AssertionError("no port is free")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "per_node"), [("one-node.sbatch", 2), ("two-nodes.sbatch", 1)])
def test_a_job_that_nears_its_limit_saves_and_is_queued_again(tmp_path, monkeypatch, file, per_node):
    """Slurm sends SIGTERM to the script alone, as --signal=B: asks."""
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "tokens")
    for name, text in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    job_id = job_with_free_port()
    variables = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "node[1-2]", "PER_NODE": str(per_node)}
    variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    script = ["bash", str(FOLDER / file), *TINY, "train.max_steps=100000"]
    job = subprocess.Popen(script, env=os.environ | variables, start_new_session=True)
    try:
        wait_for_step(5, f"runs/{job_id}", job)
        job.terminate()
        assert job.wait(timeout=120) != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert Path("queued").read_text() == f"requeue {job_id}\n"
    saved = load_checkpoint(f"runs/{job_id}")
    assert saved["step"] == curve(f"runs/{job_id}")[-1][0] and len(saved["rng"]) == 2


@pytest.mark.parametrize("file", ["one-node.sbatch", "two-nodes.sbatch"])
def test_slurm_signals_the_script_before_the_limit_and_keeps_the_job(file):
    lines = (FOLDER / file).read_text().splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    nodes = {"one-node.sbatch": 1, "two-nodes.sbatch": 2}[file]
    assert {f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=8"} <= asked
    assert {"--requeue", "--signal=B:TERM@120", "--open-mode=append"} <= asked
