"""The limits of resident programs, compared with numbers worked out by hand and with the driver's answers."""

from types import SimpleNamespace

import pytest
import torch

from bench.paper import occupancy
from bench.paper.launches import Launch
from bench.paper.occupancy import Limits

HOPPER = Limits(registers=65536, shared_bytes=228 * 1024, reserved_bytes=1024, threads=2048, programs=32)


@pytest.mark.parametrize(
    ("kernel", "programs", "cause", "share"),
    [
        # 168 registers x 32 are 21 units of 256. A quarter of 16,384 holds 3 such warps; 12 warps are 3 programs of 4.
        ((168, 40_984, 128), 3, "registers", 12 / 64),
        # 161 registers are rounded up to 168, too.
        ((161, 40_984, 128), 3, "registers", 12 / 64),
        # 73,752 + 1,024 bytes are 74,880 in units of 128; 3 of them are 224,640 of 233,472 bytes.
        ((96, 73_752, 128), 3, "shared memory", 12 / 64),
        # 64 warps are 4 programs of 16, with 32 registers a thread.
        ((32, 0, 512), 4, "registers and warps", 1.0),
        ((24, 0, 512), 4, "warps", 1.0),
        # The reserved KiB alone would allow 228 programs.
        ((24, 0, 32), 32, "programs", 0.5),
        # 158 registers: 3 warps in each of 4 quarters are one program of 8, though 65,536 / (160 x 256) is 1.6.
        ((158, 0, 256), 1, "registers", 8 / 64),
        ((24, 230_000 + 3_000, 128), 0, "shared memory", 0.0),
    ],
)
def test_the_resource_with_the_lowest_limit_is_named(kernel, programs, cause, share):
    found = occupancy.residency(*kernel, HOPPER)
    assert (found.programs, found.cause, found.occupancy) == (programs, cause, pytest.approx(share))


# Registers, shared memory and threads of tiles of flash2's plain kernel, and the resident programs by
# cuOccupancyMaxActiveBlocksPerMultiprocessor on an H100 and on an H200.
OF_DRIVER = {
    (64, 4632, 128): 8,
    (64, 9240, 128): 8,
    (86, 8224, 128): 5,
    (86, 16392, 256): 2,
    (91, 18456, 128): 5,
    (98, 16416, 128): 4,
    (104, 16416, 256): 2,
    (118, 36888, 128): 4,
    (128, 32800, 256): 2,
    (152, 73752, 128): 3,
    (158, 32776, 256): 1,
    (166, 40984, 128): 3,
    (185, 65568, 256): 1,
    (194, 65568, 128): 2,
    (210, 81944, 128): 2,
    (254, 131104, 128): 1,
    (255, 131104, 256): 1,
}


@pytest.mark.parametrize(("registers", "shared", "threads"), OF_DRIVER)
def test_the_rules_agree_with_the_driver(registers, shared, threads):
    found = occupancy.residency(registers, shared, threads, HOPPER)
    assert found.programs == OF_DRIVER[registers, shared, threads]


def test_a_grid_of_one_program_more_than_fits_needs_more_than_one_wave():
    assert occupancy.waves(264, 2, 132) == 1 and 1 < occupancy.waves(265, 2, 132) < 1.01


class Driver:
    """At most 32 programs, and 1,024 reserved bytes for each."""

    def cuDeviceGetAttribute(self, value, number, device):
        value._obj.value = {106: 32, 111: 1024}[number]
        return 0


def test_a_launch_has_its_limits_its_occupancy_and_its_waves(monkeypatch):
    """194 registers allow 2 programs on each of 3 multiprocessors, so 12 programs are two waves."""
    has = {"regs_per_multiprocessor": 65536, "shared_memory_per_multiprocessor": 228 * 1024}
    has |= {"max_threads_per_multi_processor": 2048, "multi_processor_count": 3}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=0: SimpleNamespace(**has))
    monkeypatch.setattr(occupancy.ctypes, "CDLL", lambda name: Driver())
    kernel = SimpleNamespace(n_regs=194, n_spills=0, metadata=SimpleNamespace(shared=49152, num_warps=4))
    found, held = Launch("kernel", kernel, programs=12).resources()
    assert held.by_cause == {"registers": 2, "shared memory": 4, "warps": 16, "programs": 32}
    assert (held.programs, found["occupancy"], found["waves"]) == (2, 8 / 64, 2.0)
