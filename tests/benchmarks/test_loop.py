import json

import pytest

from benchmarks import loop
from hybrid_imagenet import comm
from tests.support import in_process


@pytest.mark.slow
def test_bench_loop_measures_loop_and_bare_step_in_turns(tmp_path):
    path = tmp_path / "loop.json"
    words = ["loop", "--steps=2", "--rounds=2", f"--json={path}"]
    flags = ["--dataset=digits", "--augmentation=digits", "--image_size=16", "--per_gpu_batch=4"]
    flags += ["--model=resnet8", "--model_width=8", "--stem=3x3"]
    code, output, errors = in_process.call("benchmarks.__main__", [*words, "--", *flags])
    assert code == 0, errors
    report = json.loads(path.read_text())
    assert (report["benchmark"], report["model"], report["batch"]) == ("loop", "resnet8", 4)
    assert len(report["ratios"]) == 2
    seconds = [4 / report[key] for key in ("images_per_second", "bare_images_per_second")]
    waited = seconds[0] * report["data_wait_fraction"]
    # Waiting for data and the work of the host are parts of the time of a step.
    assert 0 < 1e-3 * report["host_milliseconds"] + waited < seconds[0]
    assert 0 < 1e-3 * report["dispatch_milliseconds"] < min(seconds)
    assert report["traces"] == 1
    assert 0 < report["checkpoint"]["blocked_seconds"] <= report["checkpoint"]["seconds"]
    assert report["validation"]["images"] == 1500
    share = report["validation"]["seconds_per_image"] / (seconds[0] / 4)
    assert abs(report["validation"]["share_of_training"] / share - 1) < 1e-6
    assert "% (rounds" in output


@pytest.mark.parametrize("is_persistent", [True, False])
def test_bench_loop_starts_the_ranks_as_the_flags_say(monkeypatch, is_persistent):
    def start(settings, *, persistent_batch_norm):
        assert persistent_batch_norm is is_persistent
        raise SystemExit

    monkeypatch.setattr(comm, "start", start)
    flag = "--persistent_batch_norm" if is_persistent else "--nopersistent_batch_norm"
    with pytest.raises(SystemExit):
        loop.main(["--", "--dataset=digits", flag])
