"""The documents tell the truth as far as reading shows it: commands, options, targets, links and examples are real.

`tests/e2e/test_documents_typed.py` types the commands.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from convoy import command
from convoy.models.errors import error_kinds
from tests.support.documents import PAGES, Block, all_blocks, blocks, name_of, parts
from tests.support.stores import ROOT

PROGRAMS = {
    "cd",
    "convoy",
    "curl",
    "docker",
    "echo",
    "export",
    "head",
    "kill",
    "kubectl",
    "ls",
    "make",
    "mkdir",
    "mv",
    "pip",
}
PROGRAMS |= {"model_signing", "openssl", "python", "serve", "yolo"}  # Ray's `serve`
# What does the work of each subcommand, once its options have been read and checked.
WORK = {
    "convoy.app.batch.command": "run",
    "convoy.app.commands.config": "show",
    "convoy.app.commands.doctor": "run",
    "convoy.app.commands.inspect": "run",
    "convoy.app.commands.predict": "predict",
    "convoy.app.server.main": "serve",
    "convoy.export.ahead": "run",
    "convoy.export.command": "run",
    "convoy.loadtest.command": "run",
    "convoy.loadtest.compare": "compare",
    "convoy.models.train_command": "run",
}
COMMANDS = [(block, tuple(words)) for block in all_blocks() for line in block.commands for words in parts(line)]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))


def in_short(value: object) -> str:
    return f"{name_of(value.page)}:{value.line}" if isinstance(value, Block) else " ".join(value)[:60]


def commands_of(*programs: str) -> Any:
    found = [(block, words) for block, words in COMMANDS if words[0] in programs]
    assert found
    return pytest.mark.parametrize(("block", "words"), found, ids=in_short)


def test_the_first_two_commands_are_the_makefiles() -> None:
    assert [words for block, words in COMMANDS if block.page.name == "README.md"][:2] == [
        ("make", "serve"),
        ("make", "test"),
    ]


def test_every_command_is_one_that_these_tests_know() -> None:
    assert [(in_short(block), words) for block, words in COMMANDS if words[0] not in PROGRAMS] == []


def test_what_is_to_be_typed_is_marked_as_such() -> None:
    """A block of commands without `bash` would be read by no test."""
    begins = re.compile(r"^(?:\.venv/bin/)?(?:convoy|curl|docker|kubectl|make|pip|python) \S", re.MULTILINE)
    unmarked = [in_short(one) for one in all_blocks() if one.language in ("", "text") and begins.search(one.text)]
    assert unmarked == []


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which commands would have gone to work; none does."""
    begun: list[str] = []
    for module, function in WORK.items():
        monkeypatch.setattr(f"{module}.{function}", lambda *_, name=module, **__: begun.append(name))
    yield begun
    gc.enable()  # which the command line turns off for a server's start


@commands_of("convoy")
def test_convoys_own_command_line_takes_the_command(
    block: Block, words: tuple[str, ...], done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"{tmp_path}{word}" if word.startswith("/") else word for word in words[1:]]
    for word in given:
        if not re.match(r"-|\w+:", word):  # perhaps a path: its folder is there, and of a server's own the file
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            if word.startswith("/"):
                Path(word).touch()
            elif word.endswith("export.yaml"):
                (tmp_path / word).write_text("source: zoo:simple_cnn\n")
    for one in blocks(block.page):
        if one.file:
            (tmp_path / one.file).write_text(one.text)
    with pytest.raises(SystemExit) as ended:
        command.main(given)
    assert ended.value.code in (0, None)
    assert len(done) == 1 or words[1:] == ("config", "schema")


@commands_of("make")
def test_every_target_of_make_is_one(block: Block, words: tuple[str, ...]) -> None:
    target, *given = words[1:]
    assert target in TARGETS
    assert [one for one in given if f"$({one.partition('=')[0]})" not in MAKEFILE] == []


@commands_of("python")
def test_every_module_that_python_is_to_run_is_one(block: Block, words: tuple[str, ...]) -> None:
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert words[1] in [one.file for one in blocks(block.page)]


@commands_of("kubectl", "docker", "curl", "convoy")
def test_every_file_of_ours_that_a_command_names_is_there(block: Block, words: tuple[str, ...]) -> None:
    ours = re.findall(r"(?<![\w/.-])((?:docs|tests)/[\w./-]+)", " ".join(words))
    assert [one for one in ours if not (ROOT / one).exists()] == []


def options_of(one: Any) -> set[str]:
    """Every option of a command and of those below it, and the words that these are called by."""
    below = getattr(one, "commands", {})
    own = {name for asked in one.params for name in (*asked.opts, *asked.secondary_opts)}
    return own.union({"--help", "--help-all"}, below, *map(options_of, below.values()))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_the_text_says_of_make_and_of_convoy_is_so(page: Path) -> None:
    """In passing, between single backticks."""
    said = re.findall(
        r"`(?:\.venv/bin/)?(make|convoy) ([^`]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    )
    whole = command._command([])
    wrong = []
    for program, rest in said:
        name = rest.split()[0]
        if not re.match(r"--|[a-z]", name):  # COMMAND, in the place of any
            continue
        if program == "make":
            wrong += [rest] if name not in TARGETS else []
            continue
        known = options_of(whole if name.startswith("--") else whole.commands[name])
        wrong += [f"{name} {option}" for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest) if option not in known]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_module_and_extra_that_the_text_names_is_one(page: Path) -> None:
    text = page.read_text()
    modules = re.findall(r"python -m ((?:convoy|tests|docs)[\w.]*)", text)
    assert [one for one in modules if importlib.util.find_spec(one) is None] == []
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    named = {one for found in re.findall(r"(?:convoy-serve|'\.)\[([\w,]+)\]", text) for one in found.split(",")}
    assert named - extras.keys() == set()


def test_what_is_said_of_another_server_links_to_its_own_documents() -> None:
    """In each column of the comparison's table but Convoy's: a link, or the dash of what was not found."""
    text = (ROOT / "docs" / "comparison.md").read_text()
    places = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", text, re.MULTILINE))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "[" in line]
    assert len(rows) > 20
    assert {len(row) for row in rows} == {8}
    bare = [cell for row in rows for cell in row[2:] if cell != "-" and not re.search(r"\]\[[\w-]+\]", cell)]
    assert bare == []
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == places.keys()


# Of docker and curl, and of the program that draws characters, which the pages name, too.
OTHERS = {"--build-arg", "--data-binary", "--gpus", "--read-only", "--shm-size", "--target", "--tmpfs", "--user"}
OTHERS |= {"--px", "--grey"}


@pytest.mark.parametrize("page", ["export", "precisions", "serving", "training", "your-own-cnn"])
def test_every_option_that_a_page_speaks_of_is_one(page: str) -> None:
    known = options_of(command._command([]))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / "docs" / f"{page}.md").read_text()))
    assert len(named) > 5
    assert named - known - OTHERS == set()


SUBCOMMANDS = ("batch", "build", "doctor", "export", "inspect", "loadtest", "predict", "serve", "train")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_option_is_spoken_of_in_some_page(name: str) -> None:
    """By its name."""
    told = "\n".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    spoken = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", told))
    asked = command._command([name]).commands[name].params
    names = [{*one.opts, *one.secondary_opts} for one in asked if one.param_type_name == "option"]
    assert [one for one in names if not one & (spoken | {"--help"})] == []


@pytest.mark.parametrize("block", [one for one in all_blocks() if one.language == "python"], ids=in_short)
def test_every_block_of_python_compiles(block: Block) -> None:
    compile(block.text, f"{name_of(block.page)}:{block.line}", "exec")


@pytest.mark.parametrize("block", [one for one in all_blocks() if one.language in ("json", "yaml")], ids=in_short)
def test_every_block_of_json_and_yaml_can_be_read(block: Block) -> None:
    """`...` stands for what is left out. Of an object the members alone may be shown."""
    if block.language == "yaml":
        yaml.safe_load(block.text)
    else:
        whole = re.sub(r",?\s*\.\.\.(?=[\]}])", "", block.text)
        json.loads(whole if whole.lstrip().startswith(("{", "[")) else f"{{{whole}}}")


def texts_of(file: Path) -> Iterator[str]:
    """The strings of a program; a row of dots for what an f-string puts in."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "..." for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("page", ["operations", "precisions"])
def test_every_message_to_look_up_is_one_of_the_program(page: str) -> None:
    """In tables whose first column is what somebody has read; `...` stands for what varies."""
    tables = re.findall(
        r"^\| (?:message|reason|symptom) \|.*\n(?:\|.*\n)+", (ROOT / "docs" / f"{page}.md").read_text(), re.M
    )
    shown = [
        one for table in tables for row in table.splitlines() for one in re.findall(r"`(.+?)`", row.split(" | ")[0])
    ]
    files = [file for folder in ("app", "export", "models") for file in (ROOT / folder).rglob("*.py")]
    printed = [text.replace("%s", "...").replace("%d", "...") for file in files for text in texts_of(file)]
    assert len(shown) > 6
    pattern = {one: re.compile(".*".join(map(re.escape, one.split("...")))) for one in shown}
    assert [one for one in shown if not any(pattern[one].search(text) for text in printed)] == []


def anchors(page: Path) -> set[str]:
    """As code hosts, and the site, make them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether there is such a file and, behind a #, such a heading in it."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert [one for one in links if not re.match(r"https?:", one) and not leads_somewhere(page, one)] == []


def test_the_table_of_codes_is_that_of_the_errors() -> None:
    section = (ROOT / "docs" / "protocol.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\w+) \| .+ \|$", section, re.MULTILINE)
    assert rows == sorted(rows, key=lambda row: row[1])
    expected = {(code, str(kind.http_status), kind.grpc_code) for code, kind in error_kinds().items()}
    assert sorted(rows) == sorted(expected)
