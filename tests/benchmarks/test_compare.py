import json

import pytest

from benchmarks import compare

OLD = {
    "benchmark": "step",
    "batch": 16,
    "images_per_second": 20.0,
    "cpu_seconds_per_step": 1.0,
    "peers": {"keras": {"images_per_second": 10.0}, "torch": {"images_per_second": 8.0}},
}


def changed(**values):
    return OLD | values


def gains(new, old=OLD):
    return {path: gain for path, _, _, gain in compare.compare(old, new)}


def test_compare_counts_lower_times_and_higher_rates_as_gains():
    result = gains(changed(images_per_second=10.0, cpu_seconds_per_step=0.5))
    assert result == {"images_per_second": 0.5, "cpu_seconds_per_step": 2.0}


def test_compare_with_slower_peers_too_reports_no_loss():
    peers = {"keras": {"images_per_second": 5.0}, "torch": {"images_per_second": 4.0}}
    assert gains(changed(images_per_second=10.0, peers=peers))["images_per_second"] == 1.0


@pytest.mark.parametrize(("rate", "code"), [(19.5, 0), (18.0, 1), (30.0, 0)])
def test_compare_returns_exit_code_1_only_for_a_worse_rate(tmp_path, capsys, rate, code):
    for name, report in (("old", OLD), ("new", changed(images_per_second=rate))):
        (tmp_path / name).write_text(json.dumps(report))
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == code
    assert ("WORSE" in capsys.readouterr().out) == bool(code)
