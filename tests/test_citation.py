"""The paper is cited alike where people and where programs look for it."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from fasterisnet import __version__

ROOT = Path(__file__).resolve().parents[1]


def test_readme_and_citation_file_agree() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    block = re.search(r"@article\{(.*?)\n\}", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert block is not None
    found = {key: value.replace("{", "").replace("}", "") for key, value in re.findall(r"(\w+) += \{(.*)\},", block[1])}
    paper = cited["preferred-citation"]
    assert found == {
        "title": paper["title"],
        "author": " and ".join(f"{a['family-names']}, {a['given-names']}" for a in paper["authors"]),
        "journal": paper["journal"],
        "volume": str(paper["volume"]),
        "pages": f"{paper['start']}--{paper['end']}",
        "year": str(paper["year"]),
        "doi": paper["doi"],
        "eprint": paper["identifiers"][0]["value"].removeprefix("arXiv:"),
        "archivePrefix": "arXiv",
    }
    assert cited["version"] == __version__
