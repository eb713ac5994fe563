"""python -m bench.paper"""

from bench.paper.runner import run
from conf.cli import launch

if __name__ == "__main__":
    launch(run, "paper")
