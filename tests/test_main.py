"""Errors of a command line before the ranks are connected: which rank prints them."""

import pytest

from hybrid_imagenet import main


@pytest.mark.parametrize(
    ("rank", "local_rank", "printed"),
    [
        (0, 0, "error: --lr=-1"),
        # Rank 0 has not ended the job, so its command line is valid.
        (2, 0, "error: rank 2 on "),
        # Another rank of the host prints it.
        (3, 1, ""),
    ],
)
def test_error_of_the_command_line_is_printed_once_per_host(
    monkeypatch, capsys, rank, local_rank, printed
):
    for name, value in {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    waits = []
    monkeypatch.setattr(main.time, "sleep", waits.append)
    monkeypatch.setattr(main, "notify_exit", lambda code: None)
    assert main.main(["--lr=-1"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(printed) and errors.count("\n") == bool(printed)
    assert waits == ([] if rank == 0 else [main._SAME_ERROR_SECONDS])
