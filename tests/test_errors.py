"""How every program writes its output, and how it quotes settings."""

import os
import select
import shlex
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from errors import assigned
from tests.e2e import ROOT

PROGRAM = """
import sys
from errors import guard_output
guard_output()
print("na\u00efve \ufffd")
for _ in range(10**5):
    print("more")
print("an error \u00ef", file=sys.stderr)
sys.exit(3)
"""


def test_output_that_cannot_be_encoded_is_escaped_and_a_closed_pipe_does_not_end_a_program():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, **pipes)
    assert process.stdout.readline() == rb"na\xefve \ufffd" + b"\n"
    process.stdout.close()  # as head does; a pipe holds less than 10**5 lines
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (3, rb"an error \xef" + b"\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_written_at_once_to_a_pipe(unbuffered):
    """PYTHONUNBUFFERED=1, which containers set, once held back all output until the end."""
    program = "import errors; errors.guard_output(); print('first'); input()"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as process:
        ready, _, _ = select.select([process.stdout], [], [], 30)
        process.stdin.close()
        assert ready and process.stdout.readline() == b"first\n"


@pytest.mark.parametrize("value", ["a", "a=1, b", 'say "hi"', "ends with a\\", 'a\\"b', "it's", "naïve #&;({"])
def test_an_assignment_can_be_pasted(value):
    [argument] = shlex.split(assigned("key", value))
    [override] = OverridesParser.create().parse_overrides([argument])
    assert (override.key_or_group, override.value()) == ("key", value)
