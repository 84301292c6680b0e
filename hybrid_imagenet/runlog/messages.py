"""Collects messages and shows each once."""

from __future__ import annotations

from hybrid_imagenet.errors import printable


class Messages:
    """Keeps messages, each shown once, and how many ranks sent it."""

    def __init__(self) -> None:
        self._ranks: dict[str, list[int | None]] = {}

    def line(self, text: str, rank: int | None) -> str | None:
        """Returns the line to show, or None if this message was shown before."""
        text = "\n".join(printable(line) for line in text.split("\n"))  # it may quote the names of files
        first = text not in self._ranks
        self._ranks.setdefault(text, []).append(rank)
        if not first:
            return None
        return text if rank is None else f"rank {rank}: {text}"

    def repeated(self) -> list[str]:
        """Returns a line for each message that several ranks sent, naming the other ranks."""
        lines = []
        for text, ranks in self._ranks.items():
            others = sorted({r for r in ranks[1:] if r is not None and r != ranks[0]})
            if others:
                shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
                lines.append(f"also from rank {shown}: {text}")
        return lines
