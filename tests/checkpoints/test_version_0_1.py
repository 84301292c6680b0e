"""Runs of version 0.1 are evaluated, exported and resumed."""

import json

import numpy as np

from hybrid_imagenet import config, train
from hybrid_imagenet.checkpoints import archive, pretrained
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.runlog import jsonl
from hybrid_imagenet.tools import evaluate
from hybrid_imagenet.tools.export import command as export
from tests.checkpoints import support, version_0_1

STEP, META = version_0_1.STEP, version_0_1.STORED["meta"]


def test_a_checkpoint_is_read_kept_and_ranked(tmp_path):
    small = {"model/0000/w": np.arange(6, dtype=np.float32).reshape(2, 3), "optimizer/0000/step": np.array(3)}
    path = tmp_path / f"step-{STEP:09d}.npz"
    path.write_bytes(version_0_1.checkpoint(small, META))
    told = []
    store = CheckpointStore(tmp_path, keep=1, keep_best=True, report=told.append)
    found = store.newest_good()
    assert told == []
    assert {name: array.tolist() for name, array in found.arrays.items()} == {k: v.tolist() for k, v in small.items()}
    state = RunState.from_dict(found.meta["state"])
    assert (state.step, state.finished_epochs, state.best_epoch) == (STEP, 1, 0)
    assert state.best_top1 == META["state"]["best_top1"]
    assert store.best_good() is None  # it does not say what its own validation was
    store.save(STEP + 4, support.ARRAYS, support.meta(STEP + 4, 0.5), wait=True)
    assert [p.name for p in tmp_path.iterdir()] == [f"step-{STEP + 4:09d}.npz"]


def test_a_run_is_evaluated_exported_and_resumed(tmp_path, capsys):
    run = tmp_path / "run"
    arrays = version_0_1.write_run(run)
    network = pretrained.load(run, print)
    stored = {name.split("/", 2)[2]: array for name, array in arrays.items() if name.startswith("model/")}
    for variable in network.build().weights:
        np.testing.assert_array_equal(variable.numpy(), stored[variable.path])
    assert evaluate.main([str(run), "--dataset=digits", "--per_gpu_batch=297", "--precision=float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 297
    assert export.main([str(run), f"--to={tmp_path / 'weights.npz'}"]) == 0
    again = pretrained.load(tmp_path / "weights.npz", print)
    assert again.weights.keys() == network.weights.keys()

    flags = [f"--{name}={value}" for name, value in version_0_1.STORED["asked"].items()]
    resolved = config.resolve([*flags, f"--run_dir={run}", "--resume", "--epochs=2", "--progress=plain"])
    assert train.run(resolved, SingleProcess()) == ""
    assert f"resumed at epoch 1.000, step {STEP}" in capsys.readouterr().out
    records = jsonl.read(run / "metrics.jsonl")
    assert records[: len(version_0_1.STORED["records"])] == version_0_1.STORED["records"]
    assert [r["epoch"] for r in records if r["kind"] == "epoch"] == [1, 2]
    assert "gap" not in {r["kind"] for r in records}
    newest = max((run / "checkpoints").glob("step-*.npz"))
    meta = archive.read(newest).meta
    assert meta["state"]["step"] == 2 * STEP
    assert meta["state"]["images"] == 2 * META["state"]["images"]
    assert meta["state"]["best_top1"] >= META["state"]["best_top1"]
    assert json.loads((run / "summary.json").read_text())["epochs"] == 2
