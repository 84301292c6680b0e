"""The live page, asked for by a real client."""

import http.client
import json
import pathlib
import re
import signal
import subprocess
import sys
import threading

import pytest

from hybrid_imagenet import files
from hybrid_imagenet.tools.report import command, load, page, serve
from tests.tools.report.synthetic import make_run


@pytest.fixture
def served(tmp_path):
    """A run, its page as a file would have it, and the port where it is served."""
    run = make_run(tmp_path / "run", epochs=3, finished=False)
    live = serve.Live([str(run)], lambda: page.build([load.load(run)], "t"))
    with serve.server(live, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield run, server.server_port
        server.shutdown()
        thread.join()


def ask(port, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection(serve.ADDRESS, port, timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_the_page_is_that_of_the_file_and_follows_the_run(served):
    run, port = served
    response, body = ask(port)
    assert (response.status, response.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
    assert body.decode() == page.build([load.load(run)], "t")
    tag = response.getheader("ETag")
    assert ask(port, If_None_Match=tag)[0].status == 304
    record = load.load(run).epochs[-1] | {"epoch": 4, "val_top1": 0.777}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    response, body = ask(port, If_None_Match=tag)
    assert response.status == 200 and response.getheader("ETag") != tag
    assert b"77.70 %" in body and body.decode() == page.build([load.load(run)], "t")


def test_the_page_says_when_a_run_no_longer_runs(served):
    run, port = served
    held = files.lock(run)
    assert b">running<" in ask(port)[1]
    held.close()
    assert b">running<" not in ask(port)[1] and b">unknown<" in ask(port)[1]


def test_nothing_else_can_be_read(served):
    run, port = served
    (run.parent / "secret").write_text("secret")
    for path in ("/config.json", "/metrics.jsonl", "/../secret", "/%2e%2e/secret", "//etc/passwd", f"{run}/config.json",
                 "*"):  # fmt: skip
        response, body = ask(port, path)
        assert (response.status, body) == (404, b"there is nothing but /\n"), path
    assert ask(port, "http://127.0.0.1/config.json")[0].status in (403, 404)  # as to a proxy
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(port, "/", method)[0].status == 501
    assert ask(port, Host="elsewhere.example")[0].status == 403
    head, body = ask(port, method="HEAD")
    assert (head.status, body) == (200, b"") and int(head.getheader("Content-Length")) > 10_000


def test_a_run_that_becomes_unreadable_is_said_and_comes_back(served):
    run, port = served
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("rubbish\n" + text)
    response, body = ask(port)
    assert response.status == 503 and b"line 1" in body and body.count(b"\n") == 1
    (run / "metrics.jsonl").write_text(text)
    assert ask(port)[0].status == 200


def test_only_the_loopback_is_listened_on(served):
    _, port = served
    sockets = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {
        fields[1].split(":")[0] for fields in sockets if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")
    }
    assert listening == {"0100007F"}


def test_a_taken_port_is_one_line(served, capsys):
    run, port = served
    assert command.main([str(run), "--serve", f"--port={port}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"--port={port}" in error and "in use" in error


def test_interruption_ends_it_quietly(tmp_path):
    run = make_run(tmp_path / "run", epochs=2)
    program = [sys.executable, "-m", "hybrid_imagenet", "report", str(run), "--serve", "--port=0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])
        assert ask(port)[0].status == 200
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
    assert (process.returncode, out, error) == (0, "", "")
    assert not (run / "report").exists()
