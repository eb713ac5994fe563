"""python -m bench.training"""

from bench.common.command_line import launch
from bench.training.compare import TrainingSettings, run

if __name__ == "__main__":
    launch(run, TrainingSettings)
