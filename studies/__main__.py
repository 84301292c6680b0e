"""`python -m studies NAME`, from a checkout."""

import sys

from hybrid_imagenet.resilience import interrupts, lossy_stream


def _run() -> int:
    from studies.command import main

    return main(sys.argv[1:])


lossy_stream.install()
sys.exit(interrupts.run_interruptible(_run))
