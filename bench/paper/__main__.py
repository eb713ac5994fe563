"""python -m bench.paper"""

from bench.common.command_line import launch
from bench.paper.runner import run
from bench.paper.settings import PaperSettings

if __name__ == "__main__":
    launch(run, PaperSettings)
