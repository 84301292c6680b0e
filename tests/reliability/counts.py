"""How many malformed inputs were tried."""

import dataclasses
import sys


@dataclasses.dataclass
class Counts:
    """Inputs that were refused with a message, and those that were harmless."""

    what: str
    refused: int = 0
    taken: int = 0

    def show(self) -> None:
        """Prints the counts past pytest's capture."""
        print(
            f"\nfuzzing {self.what}: {self.refused + self.taken} inputs, {self.refused} refused, {self.taken} taken",
            file=sys.__stdout__,
            flush=True,
        )
