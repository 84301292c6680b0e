"""Records a hang and its resume from a real run, and draws docs/recording.svg.

    . launch/env.sh && python dev/recording.py

Two ranks train the handwritten digits. After the third epoch, this script stops rank 1 with
SIGSTOP. The watchdog reports it and stops the job, and then `resume` continues. The drawing shows
every line that the program printed, in 20 seconds: waits are shortened, but the column on the left
has the real time since the command was typed. Long lines are cut, and the path of the environment
is written as "...".
"""

import dataclasses
import itertools
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "recording.svg"
RUN_DIR = "runs/digits"
START = (
    "hybrid-imagenet run -np 2 -- --flagfile=digits --model=resnet8 --model_width=16"
    f" --epochs=6 --stall_timeout=20 --run_dir={RUN_DIR}"
)
RESUME = f"hybrid-imagenet resume {RUN_DIR}"
# The beginning of the row after which rank 1 is stopped.
LAST_ROW_BEFORE_THE_HANG = "      3/6 |"
# Longer lines are cut, because the drawing shows a terminal of this width.
COLUMNS = 112
ROWS = 22
LINE_HEIGHT = 18
CHARACTER_WIDTH = 7.25
MARGIN = 14
TIME_COLUMN_WIDTH = 62
SECONDS = 20.0
# No wait of the program looks longer than this, before waits are scaled to what SECONDS leaves.
MAX_WAIT_SECONDS = 0.6
# The drawing pauses this long for the reader: after the report of the hang, after each command has
# ended, and before the drawing starts again.
PAUSE_SECONDS = 2.5
STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }
.line { fill: #d7dde4 }
.command { fill: #ffffff; font-weight: bold }
.time { fill: #7d8894 }
.stall { fill: #f5c56b }
.error { fill: #ff9d90 }
.next { fill: #7fd6a0 }
"""


@dataclasses.dataclass
class Line:
    """A line of the recording.

    Attributes:
      seconds: Real time since the command before it was typed.
      text: What was typed or printed.
      typed: Whether it is a command.
    """

    seconds: float
    text: str
    typed: bool = False

    @property
    def kind(self):
        """Returns which of the kinds of lines in STYLE this is."""
        prefix = self.text.partition(":")[0]
        if self.typed:
            return "command"
        return prefix if prefix in ("stall", "error", "next") else "line"


def main():
    """Records both commands and writes the drawing."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="recording-"))
    try:
        lines = record(START, directory, hang_rank=1)
        lines += record(RESUME, directory)
    finally:
        shutil.rmtree(directory)
    OUTPUT.write_text(draw(lines), encoding="utf-8")
    print(f"{OUTPUT}: {len(lines)} lines")


def record(command, directory, hang_rank=None):
    """Runs a command and returns its lines.

    Args:
      command: What is typed.
      directory: Working directory.
      hang_rank: Rank to stop with SIGSTOP after the row that LAST_ROW_BEFORE_THE_HANG begins; None
        for no rank.
    """
    words = [sys.executable, "-m", "hybrid_imagenet", *shlex.split(command)[1:]]
    packages = sysconfig.get_path("purelib")
    start = time.monotonic()
    lines = [Line(0.0, command, typed=True)]
    process = subprocess.Popen(
        words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for text in process.stdout:
        shown = text.rstrip("\n").replace(packages, "...")
        lines.append(Line(time.monotonic() - start, shown))
        if hang_rank is not None and text.startswith(LAST_ROW_BEFORE_THE_HANG):
            os.kill(process_of_rank(hang_rank, process.pid), signal.SIGSTOP)
    process.wait()
    return lines


def process_of_rank(rank, launcher):
    """Returns the process that mpirun has started as a rank below a launcher.

    Raises:
      LookupError: If there is none.
    """
    wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    new = [launcher]
    while new:
        process = new.pop()
        children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
        environment = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        if wanted in environment:
            return process
        new += map(int, children)
    raise LookupError(f"The launcher {launcher} has no rank {rank}.")


def times_in_the_drawing(lines):
    """Returns when each line appears, in seconds since the start of the drawing."""
    waits = []
    pauses = []
    for previous, line in itertools.pairwise(lines):
        # A typed command starts a new clock.
        wait = 0.0 if line.typed else line.seconds - previous.seconds
        waits.append(min(wait, MAX_WAIT_SECONDS))
        is_end_of_report = previous.kind == "stall" and line.kind != "stall"
        pauses.append(PAUSE_SECONDS if line.typed or is_end_of_report else 0.0)
    scale = (SECONDS - PAUSE_SECONDS - sum(pauses)) / sum(waits)
    times = [0.0]
    for wait, pause in zip(waits, pauses, strict=True):
        times.append(times[-1] + wait * scale + pause)
    return times


def draw(lines):
    """Returns an animated drawing of the lines as SVG, as a terminal shows them one by one."""
    times = times_in_the_drawing(lines)
    width = round(2 * MARGIN + TIME_COLUMN_WIDTH + COLUMNS * CHARACTER_WIDTH)
    height = 2 * MARGIN + ROWS * LINE_HEIGHT
    texts = [draw_line(index, line, times[index]) for index, line in enumerate(lines)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>A rank hangs, is reported, the job stops, and resume continues</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1b2028"/>',
            f'<clipPath id="screen"><rect x="0" y="{MARGIN}" width="{width}"'
            f' height="{ROWS * LINE_HEIGHT}"/></clipPath>',
            '<g clip-path="url(#screen)"><g>',
            scrolling(times),
            *texts,
            "</g></g>",
            "</svg>",
            "",
        ]
    )


def draw_line(index, line, appears):
    """Returns a line of the terminal, hidden until it appears.

    Args:
      index: Its number, from 0.
      line: The line.
      appears: When, in seconds since the start of the drawing.
    """
    y = MARGIN + (index + 1) * LINE_HEIGHT - 5
    text = f"$ {line.text}" if line.typed else line.text
    if len(text) > COLUMNS:
        text = text[: COLUMNS - 1] + "…"
    real_time = "" if line.typed else f"{line.seconds:6.1f} s"
    key_times = f"0;{appears / SECONDS:.4f}"
    return (
        f'<g visibility="hidden"><animate attributeName="visibility" values="hidden;visible"'
        f' keyTimes="{key_times}" dur="{SECONDS:g}s" calcMode="discrete"'
        f' repeatCount="indefinite"/><text class="time" x="{MARGIN}" y="{y}">{real_time}</text>'
        f'<text class="{line.kind}" x="{MARGIN + TIME_COLUMN_WIDTH}" y="{y}">{escape(text)}</text>'
        "</g>"
    )


def scrolling(times):
    """Returns the animation that moves the lines up when the screen is full."""
    offsets = ["0 0"]
    key_times = ["0"]
    for index in range(ROWS, len(times)):
        offsets.append(f"0 {-(index + 1 - ROWS) * LINE_HEIGHT}")
        key_times.append(f"{times[index] / SECONDS:.4f}")
    return (
        '<animateTransform attributeName="transform" type="translate"'
        f' values="{";".join(offsets)}" keyTimes="{";".join(key_times)}" dur="{SECONDS:g}s"'
        ' calcMode="discrete" repeatCount="indefinite"/>'
    )


if __name__ == "__main__":
    main()
