"""Walk through the papers' algorithms: python -m kernels.reference [--html [PATH]]."""

import argparse
import signal
from pathlib import Path

from kernels.reference.page import write_page
from kernels.reference.walk import walk


def main() -> None:
    """Print the walk, or write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.reference",
        description="Walk through the algorithms of the FlashAttention papers on small examples, tile by tile.",
    )
    parser.add_argument(
        "--html",
        nargs="?",
        type=Path,
        const=Path("flash-attention.html"),
        metavar="PATH",
        help="write an interactive page instead, for any N, d and tiles (default: %(const)s); it needs no network",
    )
    path = parser.parse_args().html
    if path is None:
        walk()
        return
    try:
        write_page(path)
    except OSError as error:
        parser.error(f"--html={path} cannot be written ({error.strerror}); choose a file in an existing folder")
    print(path)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback if `head` closes the pipe
    main()
