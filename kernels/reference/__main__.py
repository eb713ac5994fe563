"""Walk through the papers' algorithms: python -m kernels.reference."""

import argparse
import signal

from kernels.reference.walk import walk


def main() -> None:
    """Print the walk."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback if `head` closes the pipe
    parser = argparse.ArgumentParser(
        prog="python -m kernels.reference",
        description="Walk through the algorithms of the FlashAttention papers on small examples, tile by tile.",
    )
    parser.parse_args()
    walk()


if __name__ == "__main__":
    main()
