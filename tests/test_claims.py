"""Tests that the table of the papers' claims names existing files and counts verdicts correctly."""

import collections
import pathlib
import re

from hybrid_imagenet import config, recipes

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dev" / "claims.md"
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
    """Returns the rows of the table, with all sections together."""
    lines = re.findall(r"^\| ([HSJN]\d+ \|.*) \|$", PAGE.read_text(), re.M)
    return [Row(*(cell.strip() for cell in line.split("|"))) for line in lines]


def counts(paper=None):
    """Returns the number of rows in all and by verdict, for one paper (its letter) or for all."""
    verdicts = [row.verdict.strip("*") for row in rows() if paper in (None, row.number[0])]
    return [len(verdicts), *(verdicts.count(verdict) for verdict in VERDICTS)]


def test_rows_of_each_paper_are_numbered_from_1():
    for paper in PAPERS:
        numbers = [row.number for row in rows() if row.number[0] == paper]
        assert numbers == [f"{paper}{number}" for number in range(1, len(numbers) + 1)]
        assert len(numbers) > 5


def test_rows_of_the_claims_have_a_verdict_with_its_evidence():
    for row in rows():
        assert row.verdict in [f"**{verdict}**" for verdict in VERDICTS], row
        assert row.place and row.claim and row.evidence, row
        if row.verdict == "**supported**":
            assert row.test, row
        if FORMULA in row.evidence:
            assert row.verdict == "**supported**", row


def names_in(cell):
    """Returns the names in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_rows_of_the_claims_name_files_and_flags_that_exist():
    for row in rows():
        for name in names_in(f"{row.where} {row.test} {row.evidence}"):
            if name.endswith((".py", ".sh")):
                assert (ROOT / name).is_file() or (ROOT / "hybrid_imagenet" / name).is_file(), (
                    row.number,
                    name,
                )
            elif name.startswith("--"):
                flag = name.removeprefix("--").partition("=")[0]
                # --cluster is a flag of `hybrid-imagenet plan`.
                assert flag in {*config.OPTIONS, "cluster"}, (row.number, name)
        for name in names_in(row.test):
            assert name.startswith("tests/") and name.endswith(".py"), (row.number, name)


def test_rows_of_the_claims_name_recipes_that_exist():
    for row in rows():
        if row.where.startswith("recipe"):
            assert set(names_in(row.where)) <= set(recipes.names()), row.number


def test_references_between_rows_name_existing_rows():
    numbers = {row.number for row in rows()}
    named = re.findall(r"\b[HSJN]\d+\b(?! SXM)", " ".join(row.evidence for row in rows()))
    assert {name for name in named if name not in ("H100", "H200")} <= numbers


def test_counts_of_both_pages_equal_the_table():
    page = PAGE.read_text()
    for paper, title in {**PAPERS, None: "all"}.items():
        cells = " | ".join(map(str, counts(paper)))
        assert f"| {title} | {cells} |" in page
    total, *by_verdict = counts()
    summary = SUMMARY.read_text()
    assert f"All [{total} claims](dev/claims.md)" in summary
    for verdict, number in zip(VERDICTS, by_verdict, strict=True):
        assert f"| {verdict} | {number} |" in summary


def test_summary_says_how_many_supported_claims_are_formulas_settings_and_findings():
    supported = [row for row in rows() if row.verdict == "**supported**"]
    formulas = {row.number for row in supported if FORMULA in row.evidence}
    settings = {row.number for row in supported} & SETTINGS
    assert settings == SETTINGS
    assert not formulas & settings
    findings = len(supported) - len(formulas) - len(settings)
    assert (
        f"Of the {len(supported)} supported claims, {len(formulas)} are formulas that equal an"
        f" independent reference, {len(settings)} are settings that the program has, and"
        f" {findings} are findings"
    ) in " ".join(SUMMARY.read_text().split())


def test_summary_has_only_verdicts_of_the_table():
    verdicts = re.findall(r"^\| [^|]+\| [^|]+\| \*\*([^*]+)\*\* \|", SUMMARY.read_text(), re.M)
    assert len(verdicts) > 9
    assert set(verdicts) <= set(VERDICTS)
