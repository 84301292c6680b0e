"""Tests the table of the papers' claims.

It names existing files, and docs/papers.md has its verdicts.
"""

import collections
import csv
import pathlib
import re

from hybrid_imagenet import config, recipes
from tests.support.pages import anchors

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "studies" / "claims.csv"
SUMMARY = ROOT / "docs" / "papers.md"
PAPERS = {"H": "Lu et al.", "S": "Mikami et al.", "J": "Jia et al.", "N": "HAL"}
VERDICTS = ["supported", "not supported", "inconclusive", "not tested", "removed"]
FORMULA = "Our formula equals an independent reference"
# Supported rows that say only that the program has a setting of the paper.
SETTINGS = {
    *("H19", "H20", "H21", "H23", "H26", "H27", "H28", "H29", "H37", "H80"),
    *("S12", "S21", "J6", "J8", "J10", "N1"),
}

Row = collections.namedtuple("Row", "number place claim where test verdict evidence")


def rows():
    """Returns the rows of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        header, *cells = csv.reader(file)
    assert tuple(header) == Row._fields
    return [Row(*row) for row in cells]


def counts(paper=None):
    """Returns the number of rows in all and by verdict, for one paper (its letter) or for all."""
    verdicts = [row.verdict for row in rows() if paper in (None, row.number[0])]
    return [len(verdicts), *(verdicts.count(verdict) for verdict in VERDICTS)]


def test_rows_of_each_paper_are_numbered_from_1():
    for paper in PAPERS:
        numbers = [row.number for row in rows() if row.number[0] == paper]
        assert numbers == [f"{paper}{number}" for number in range(1, len(numbers) + 1)]
        assert len(numbers) > 5


def test_rows_of_the_claims_have_a_verdict_with_its_evidence():
    for row in rows():
        assert row.verdict in VERDICTS, row
        assert row.place and row.claim and row.evidence, row
        if row.verdict == "supported":
            assert row.test, row
        if FORMULA in row.evidence:
            assert row.verdict == "supported", row


def names_in(row):
    """Returns the words of the columns `where` and `test`, and the names in backticks."""
    words = f"{row.where} {row.test}".replace(",", "").split()
    return words + re.findall(r"`([^`]+)`", row.evidence)


def test_rows_of_the_claims_name_files_and_flags_that_exist():
    for row in rows():
        for name in names_in(row):
            path, _, anchor = name.partition("#")
            if "/" in path or path.endswith((".py", ".sh")):
                assert (ROOT / path).is_file(), (row.number, name)
                assert not anchor or anchor in anchors(ROOT / path), (row.number, name)
            elif name.startswith("--"):
                flag = name.removeprefix("--").partition("=")[0]
                # --cluster is a flag of `hybrid-imagenet plan`.
                assert flag in {*config.OPTIONS, "cluster"}, (row.number, name)
        assert not row.test or row.test.startswith("tests/"), row.number


def test_rows_of_the_claims_name_recipes_that_exist():
    for row in rows():
        first, *names = row.where.replace(",", "").replace(" to ", " ").split() or [""]
        if first in ("recipe", "recipes"):
            assert set(names) <= set(recipes.names()), row.number


def test_references_between_rows_name_existing_rows():
    numbers = {row.number for row in rows()}
    named = re.findall(r"\b[HSJN]\d+\b(?! SXM)", " ".join(row.evidence for row in rows()))
    assert {name for name in named if name not in ("H100", "H200")} <= numbers


def test_counts_of_the_summary_equal_the_table():
    summary = SUMMARY.read_text()
    columns = [counts(), *map(counts, PAPERS)]
    assert f"| verdict | claims | {' | '.join(PAPERS.values())} | meaning |" in summary
    for name, *numbers in zip(["all", *VERDICTS], *columns, strict=True):
        assert f"| {name} | {' | '.join(map(str, numbers))} | " in summary
    assert f"We checked [{len(rows())} claims](#every-claim) of theirs" in summary


def test_summary_has_the_claim_and_the_verdict_of_each_row():
    lines = re.findall(r"^\| ([HSJN]\d+ \|.*) \|$", SUMMARY.read_text(), re.M)
    assert lines == [f"{row.number} | {row.claim} | {row.verdict}" for row in rows()]


def test_summary_says_how_many_supported_claims_are_formulas_settings_and_findings():
    supported = [row for row in rows() if row.verdict == "supported"]
    formulas = {row.number for row in supported if FORMULA in row.evidence}
    settings = {row.number for row in supported} & SETTINGS
    assert settings == SETTINGS
    assert not formulas & settings
    findings = [row.number for row in supported if row.number not in formulas | settings]
    assert (
        f"Of the {len(supported)} supported claims, {len(formulas)} are formulas that equal an"
        f" independent reference, {len(settings)} are settings that the program has, and"
        f" {len(findings)} are findings, such as an accuracy or a speed: {', '.join(findings)}."
    ) in " ".join(SUMMARY.read_text().split())


def test_summary_has_only_verdicts_of_the_table():
    verdicts = re.findall(r"^\| [^|]+\| [^|]+\| \*\*([^*]+)\*\* \|", SUMMARY.read_text(), re.M)
    assert len(verdicts) > 9
    assert set(verdicts) <= set(VERDICTS)


def section(title):
    """Returns the text of a section of the summary."""
    after = SUMMARY.read_text().partition(f"\n## {title}\n")[2]
    return after.partition("\n## ")[0]


def test_summary_counts_what_is_missing_by_system():
    text = section("What is done and what is missing")
    states = ["partly", "removed", "impossible here"]
    rows_of_list = r"^\| ([^|]+) \| [^|]*\| (partly|removed|impossible here) \| [^|]+ \|$"
    missing = re.findall(rows_of_list, text, re.M)
    counted = re.findall(r"^\| ([^|]+)" + r" \| (\d+)" * 5 + r" \|$", text, re.M)
    assert [name for name, *_ in counted] == [*PAPERS.values(), "design", "all"]
    for name, *numbers in counted:
        total, done, *others = map(int, numbers)
        states_of_system = [state for system, state in missing if name in (system, "all")]
        assert others == [states_of_system.count(state) for state in states], name
        assert done == total - sum(others), name
    *systems, (_, *of_all) = counted
    for number, values in zip(of_all, zip(*(row[1:] for row in systems), strict=True), strict=True):
        assert int(number) == sum(map(int, values))
    assert f"These {len(missing)} are not done:" in text
    claims = {row.number for row in rows()}
    assert set(re.findall(r"\b[HSJN]\d+\b", text.partition("not done:")[2])) <= claims


def test_summary_of_the_abstract_has_intervals_of_the_claims_that_it_names():
    lines = re.findall(
        r"^\| .*\(.*\) \| \*\*.*$", section("The abstract of Lu et al., claim by claim"), re.M
    )
    assert len(lines) == 9
    evidence = {row.number: row.evidence for row in rows()}
    for line in lines:
        names = re.findall(r"\bH\d+\b", line.partition(" | ")[0])
        texts = [evidence[name] for name in names]
        for interval in re.findall(r"\d+\.\d+ ± \d+\.\d+", line):
            assert any(interval in text for text in texts), (names, interval)
