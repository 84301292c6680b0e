"""`python -m studies.search`, from a checkout."""

import sys

from hybrid_imagenet.resilience import interrupts, lasting_output


def _run() -> int:
    from studies.search.command import main

    return main(sys.argv[1:])


lasting_output.install()
sys.exit(interrupts.ended_by_one_line(_run))
