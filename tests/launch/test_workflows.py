"""Tests that workflows agree with the metadata, and publish only if the owner has enabled it."""

import re
import tomllib

import pytest
import yaml

from tests.launch.shell import LAUNCH, ROOT, run

WORKFLOWS = ROOT / ".github" / "workflows"


def load(name):
    return yaml.safe_load((WORKFLOWS / name).read_text())


def test_ci_runs_on_every_supported_python_and_tensorflow():
    jobs = load("ci.yml")["jobs"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
    assert jobs["checks"]["strategy"]["matrix"]["python"] == pythons
    older = [path.stem.removeprefix("tensorflow-") for path in LAUNCH.glob("tensorflow-*.txt")]
    assert jobs["tensorflow"]["strategy"]["matrix"]["tensorflow"] == sorted(older)


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_scripts_that_a_workflow_runs_exist(name):
    commands = re.findall(r"(?:\.ci|launch)/[\w.]+", (WORKFLOWS / name).read_text())
    scripts = {command for command in commands if not command.endswith((".txt", ".py"))}
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_release_publishes_only_if_a_variable_is_set():
    page = (ROOT / "docs" / "dev" / "releasing.md").read_text()
    jobs = load("release.yml")["jobs"]
    assert "if" not in jobs.pop("build")
    for job in jobs.values():
        (variable,) = re.findall(r"vars\.(\w+) == 'true'", job["if"])
        assert "github.ref_type == 'tag' && " in job["if"]
        assert f"| `{variable}` |" in page
        assert job["needs"] == "build"


def test_release_script_rejects_a_tag_that_is_not_the_version():
    result = run(ROOT / ".ci" / "release", "v99.0.0")
    assert result.returncode == 1
    assert "error: The tag is v99.0.0, but hybrid_imagenet/__init__.py has version" in result.stderr


def test_bug_report_form_asks_for_environment_and_report():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    text = str(form["body"])
    assert "hybrid-imagenet env" in text
    assert "report.json" in text
