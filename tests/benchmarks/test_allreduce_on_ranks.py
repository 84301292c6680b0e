"""Tests of `bench allreduce` on two ranks."""

import json

import pytest

from tests.support import program


@pytest.mark.slow
def test_bench_allreduce_prints_a_row_for_each_algorithm_compression_and_size(pools, tmp_path):
    target = tmp_path / "rows.json"
    words = ["allreduce", "--sizes=4K,1M", "--algorithms=mpi,ring,torus", "--compression=none,fp16"]
    done = program.run_on(
        pools[2], "hybrid_imagenet.benchmarks.__main__", *words, f"--json={target}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(target.read_text())
    expected = {("mpi", "none")} | {(a, c) for a in ("ring", "torus") for c in ("none", "fp16")}
    for size in (4096, 2**20):
        rows_of_size = [row for row in rows if row["bytes"] == size]
        assert {(row["algorithm"], row["compression"]) for row in rows_of_size} == expected
        for row in rows_of_size:
            assert row["seconds"] > 0 and row["ranks"] == 2
            assert row["wire_bytes"] == size // (2 if row["compression"] == "fp16" else 1)
            assert row["busbw_gb_s"] == pytest.approx(row["wire_bytes"] / row["seconds"] / 1e9)
    assert "busbw GB/s" in done.stdout
