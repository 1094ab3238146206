"""Documents: links lead somewhere, named sessions exist, examples run."""

import re
from pathlib import Path

import pytest

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
CITED = re.compile(r"\bdocs/[\w./-]+\.(?:md|png|svg)\b")
SESSION = re.compile(r"nox -s '?([\w.-]*\w)")
USAGE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def documents(files) -> list[Path]:
    return [path for path in files if path.suffix == ".md"]


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as code hosts make them."""
    headings = HEADING.findall(FENCE.sub("", path.read_text()))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_links_resolve(root, documents):
    broken = []
    for path in documents:
        for target in LINK.findall(FENCE.sub("", path.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            aim = path.parent / name if name else path
            missing = anchor and aim.suffix == ".md" and anchor not in anchors(aim)
            if not aim.exists() or missing:
                broken.append(f"{path.relative_to(root)}: {target}")
    assert broken == []


def test_cited_documents_exist(root, files):
    cited = []
    for path in files:
        if path.suffix in {".md", ".py", ".toml"}:
            names = CITED.findall(path.read_text())
            cited += [(path, name) for name in names if not (root / name).exists()]
    assert [f"{path.relative_to(root)}: {name}" for path, name in cited] == []


def test_named_sessions_exist(root, documents):
    source = (root / "noxfile.py").read_text()
    known = set(re.findall(r"^def ([a-z_]+)\(session", source, re.MULTILINE))
    known |= set(re.findall(r'name="([\w-]+)"', source))
    families = {"compile": r"sm\d+", "gpu": r"sm\d+", "install": r"quack-\w+", "tests": r"3\.\d+"}
    for family, members in families.items():
        known |= {f"{family}-{each}" for each in re.findall(f'"({members})"', source)}
    unknown = [
        f"{path.relative_to(root)}: {name}"
        for path in documents
        for name in SESSION.findall(path.read_text())
        if name not in known
    ]
    assert unknown == []


USED = [
    "README.md",
    "docs/guides/start-at-once.md",
    "packages/quack-blockscaled/README.md",
    "packages/quack-gemm/README.md",
    "packages/quack-norm/README.md",
]


@pytest.fixture(scope="module")
def what_blocks_raise(root, fresh_python) -> dict[str, list[str | None]]:
    """Of each document; in one interpreter, as torch takes its time. Blocks have their own names."""
    blocks = {name: USAGE.findall((root / name).read_text()) for name in USED}
    return fresh_python(f"""
import traceback

def raised(block):
    try:
        exec(block, {{}})
    except BaseException:
        return traceback.format_exc()

result = {{name: list(map(raised, blocks)) for name, blocks in {blocks!r}.items()}}
""")


@pytest.mark.parametrize("name", USED)
def test_usage_runs_on_this_machine(what_blocks_raise, name):
    assert what_blocks_raise[name]
    assert [error for error in what_blocks_raise[name] if error] == []
