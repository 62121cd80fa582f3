"""The documents: links and anchors resolve, commands parse, settings in them are ours, what troubleshooting quotes is in the code."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvxfer import cli
from kvxfer.config import UPSTREAM_IGNORED, Settings, settings_from

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def prose(text: str) -> str:
    """A page without its blocks of code."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading as Python-Markdown's toc makes it (markdown/extensions/toc.py, slugify)."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = re.sub(r"[^\w\s-]", "", text.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


def anchors(page: Path) -> set[str]:
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+?) *$", prose(page.read_text()), re.MULTILINE):
        one, number = slug(heading), 1
        while (one if number == 1 else f"{one}_{number - 1}") in found:
            number += 1
        found.append(one if number == 1 else f"{one}_{number - 1}")
    return set(found)


# --- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", prose(page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), f"{target}: there is no {there}"
        if page.is_relative_to(DOCS):
            assert there.is_relative_to(DOCS), f"{target}: outside of the site"
        assert not anchor or anchor in anchors(there), f"{target}: {sorted(anchors(there))}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_file_that_is_named_exists(page: Path) -> None:
    for named in re.findall(
        r"`((?:docs|tests|scripts|kvxfer|platforms|deploy|requirements)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / named).exists() or (ROOT / f"{named}.py").exists(), named


def test_the_site_has_every_page_and_each_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [page for child in (node.values() if isinstance(node, dict) else node) for page in pages(child)]

    assert sorted(pages(site["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.skipif(
    shutil.which("mkdocs") is None, reason="mkdocs-material is not installed: pip install 'kvxfer[docs]'"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = ["mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "quickstart.html").exists()


# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    page: Path
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text[:60]}"


def blocks(text: str) -> list[str]:
    """Blocks of code, fenced and indented."""
    fenced = re.findall(r"^( *)```\w*\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^(?: {4}|\t).*\n?|^\s*\n(?= {4}))+", rest, re.MULTILINE)
    return [body for _, body in fenced] + indented


def commands(page: Path) -> list[Command]:
    """Commands in blocks of code, those over several lines (a backslash, or a quote that is open) joined; and in the prose."""
    text, found = page.read_text(), []
    for block in blocks(text):
        open_line = ""
        for line in block.splitlines():
            open_line = f"{open_line} {line.strip()}".strip() if open_line else line.strip()
            if open_line.endswith("\\"):
                open_line = open_line[:-1]
                continue
            if open_line.count("'") % 2 and re.search(r"--kv-transfer-config '|-d '", open_line):
                continue
            found.append(open_line)
            open_line = ""
    found += re.findall(r"`((?:kvxfer|bash|python|pytest) [^`]+)`", prose(text))
    parts = (part.strip() for line in found for part in re.split(r"&&|\|(?! )|; ", line))
    return [Command(page, part) for part in parts]


ALL = [command for page in PAGES for command in commands(page)]


def words(text: str) -> list[str]:
    """A command's words, without variables before it, a comment, what it is piped into, or where its output goes."""
    text = re.sub(r"\s{2,}(?:#|[a-zA-Z]).*$", "", text) if "'" not in text else text
    found = shlex.split(re.split(r"\s(?:\||>|2>)", text)[0].rstrip(" …"), comments=True)
    while found and re.match(r"^[A-Z_]+=", found[0]):
        found.pop(0)
    return found


def of(*starts: str) -> list[Command]:
    found = []
    for command in ALL:
        bare = re.sub(r"^(?:[A-Z_]+=\S*\s+)+", "", command.text).removeprefix(".venv/bin/").removeprefix("$ ")
        if bare.startswith(starts):
            found.append(Command(command.page, bare))
    return found


OURS = [one for one in of("kvxfer ") if re.match(r"kvxfer [a-z]", one.text)]


@pytest.mark.parametrize("command", OURS, ids=str)
def test_our_commands_are_understood_by_the_real_parser(command: Command) -> None:
    understood(command.text)


@pytest.mark.parametrize(
    "wrong",
    ["kvxfer records h:1 --lasst 5", "kvxfer recordz h:1", "kvxfer bench nothing", "kvxfer trace h:1 --interval soon"],
)
def test_what_the_real_parser_does_not_understand_is_found(wrong: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|valid"):
        understood(wrong)


def understood(text: str) -> None:
    """Raise what the command line's parser (click's, or typer's own copy of it) says of a command."""
    import typer

    if not cli.app.registered_commands:
        cli._register_commands()
    at: Any = typer.main.get_command(cli.app)
    arguments, context = words(text)[1:], None
    while hasattr(at, "resolve_command"):
        context = at.make_context(at.name, [], parent=context, resilient_parsing=True)
        _, at, arguments = at.resolve_command(context, arguments)
        assert at is not None, f"{text}: no such command"
    try:
        at.make_context(at.name, arguments, parent=context)
    except Exception as error:
        missing = type(error).__name__ == "MissingParameter"  # "kvxfer records" in a sentence
        argument = type(error).__name__ == "NoArgsIsHelpError" or "requires an argument" in str(error)
        readers = "does not exist" in str(error) or re.search(
            r"\b[A-Z]{2,}\b", text
        )  # files and names that a reader has
        if not (missing or argument or (readers and type(error).__name__ == "BadParameter")):
            raise


@pytest.mark.parametrize("command", of("bash scripts/", "python scripts/"), ids=str)
def test_scripts_exist_and_are_sound(command: Command) -> None:
    script = ROOT / words(command.text)[1]
    assert script.is_file()
    if script.suffix == ".sh":
        subprocess.run(["bash", "-n", str(script)], check=True)
    else:
        ast.parse(script.read_text())


@pytest.mark.parametrize("command", of("python -m "), ids=str)
def test_modules_that_are_run_exist(command: Command) -> None:
    assert importlib.util.find_spec(words(command.text)[2]) is not None


@pytest.mark.parametrize("command", of("pytest "), ids=str)
def test_tests_that_are_run_exist(command: Command) -> None:
    paths = [word.partition("::")[0] for word in words(command.text) if word.startswith("tests/")]
    assert paths
    assert all((ROOT / path).exists() for path in paths)


OF_KV_TRANSFER_CONFIG = {
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "engine_id",
    "kv_load_failure_policy",
    "kv_connector_extra_config",
}
SERVED = [one for one in of("vllm serve") if "--kv-transfer-config" in one.text]


@pytest.mark.parametrize("command", SERVED, ids=str)
def test_engines_are_started_with_settings_that_are_read(command: Command) -> None:
    line = words(command.text)
    text = re.sub(r",\s*…\}", "}", line[line.index("--kv-transfer-config") + 1])
    config = json.loads(text)
    assert set(config) <= OF_KV_TRANSFER_CONFIG
    assert config["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    extra = config.get("kv_connector_extra_config", {})
    if config["kv_connector"].startswith("Nixl"):
        assert set(extra) <= UPSTREAM_IGNORED | {"backends"}, "upstream's, as it was before"
        return
    assert config["kv_connector"] in connectors()
    settings_from(extra, {})


def connectors() -> set[str]:
    tree = ast.parse((ROOT / "kvxfer" / "connector" / "connectors.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "KvxferConnector"}


def test_the_finders_find() -> None:
    assert len(OURS) > 40
    assert len(SERVED) >= 9
    assert len(of("bash scripts/")) > 10
    assert {one.page.name for one in SERVED} >= {
        "README.md",
        "quickstart.md",
        "p5en.md",
        "trn2.md",
        "moving.md",
        "neuron.md",
    }


# --- pages that quote the code --------------------------------------------------------------------------------------


def templates() -> list[str]:
    """Every text of the code, with … where something is filled in."""
    found = []
    for path in (ROOT / "kvxfer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:\.\d+f|[sdrg])", "…", node.value))
    return found


TROUBLE = (DOCS / "troubleshooting.md").read_text()
QUOTED = [
    text
    for section in re.split(r"^## ", TROUBLE, flags=re.MULTILINE)
    if not section.startswith("It is slow")
    for text in re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text.replace("……", "…") for text in templates() if " " in text]


@pytest.mark.parametrize("quoted", QUOTED)
def test_an_error_that_is_explained_is_one_that_the_code_has(quoted: str, texts: list[str]) -> None:
    wanted = re.compile(".*?".join(re.escape(part) for part in quoted.strip("… ").split("…")))
    assert any(wanted.search(text) for text in texts), quoted


def test_enough_errors_are_explained() -> None:
    assert len(QUOTED) > 40


def test_every_ignored_key_of_upstream_has_its_row_and_what_it_becomes_is_a_setting() -> None:
    table = (DOCS / "moving.md").read_text().partition("## Settings side by side")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|([^|]*)\|", table, re.MULTILINE)
    assert {name for name, _ in rows} >= UPSTREAM_IGNORED
    for name, ours in rows:
        for setting in re.findall(r"`(\w+)`", ours):
            assert setting in Settings.__struct_fields__, f"{name}: {setting}"
