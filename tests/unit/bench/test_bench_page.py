"""The page of ``kvxfer report``: its numbers are the files', it needs nothing from elsewhere, and nothing in a file can break it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("aiohttp")

from kvxfer.bench import charts, command, results
from kvxfer.bench.page import METRICS, Source, merged, page, value_of

app = typer.Typer()
command.register(app)

EVIL = '<script>alert("x")</script>&amp;'
VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Collects cells by row, text, and what the page would fetch; holds that every tag is closed where it must be."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.rows: dict[tuple[str, str], dict[str, float]] = {}
        self.row: tuple[str, str] | None = None
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:
        told = dict(attrs)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [told[name] for name in ("src", "href") if name in told and not told[name].startswith("data:")]
        if tag == "tr":
            self.row = (told["data-point"], told["data-arm"]) if "data-point" in told else None
        if tag == "td" and self.row and told.get("data-where"):
            self.rows.setdefault(self.row, {})[told["data-where"]] = float(told["data-value"])

    def handle_startendtag(self, tag, _attrs) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data) -> None:
        self.text += data


def arm(ttft: float, **more):
    return {
        "requests": 4, "failed": 0, "prefix_hits": 0, "errors": [], "handoffs": None,
        "ttft_ms": results.spread([ttft, ttft + 1, ttft + 2, ttft + 3]), "tpot_ms": results.spread([5.0]),
        "itl_ms": results.spread([5.0, 6.0]),
        "stages_ms": {"median": {"to prefill": 1.0, "moving": ttft - 1}, "p99": {"moving": ttft + 3}}, **more,
    }  # fmt: skip


def point(name, arms, *, qps=None):
    return {"name": name, "input": 1000, "output": 16, "qps": qps, "trace": "uniform", "requests": 4, "arms": arms}


def pd(**more):
    head = {"schema": "kvxfer-bench", "version": 1, "kind": "pd", "made": "2026-01-01T00:00:00+00:00"}
    head |= {"versions": {"vllm": "0.0"}, "machine": {"cpu": "a", "cores": 2, "accelerators": ["gpu"]}}
    fence = {"fence_to_report_ms": results.spread([7.5])}
    return head | {
        "settings": {"prefix_caching": False, "model": "qwen3-8b"}, "complaints": [], "skipped": [], "verified": None,
        "points": [
            point("1000", {"alone": arm(30.0), "push": arm(40.0, exposed_ms={"of_medians": 10.25}, handoffs=fence)}),
            point("1000@8", {"push": arm(50.0), "pull": arm(60.0)}, qps=8.0),
            point("1000@4", {"push": arm(45.0), "pull": arm(55.0)}, qps=4.0),
        ],
    } | more  # fmt: skip


def turns(leg, first):
    return {
        **pd(), "kind": "multiturn", "settings": {"leg": leg, "prefix_caching": False},
        "turns": [
            {"turn": t, "prompt_tokens": results.spread([1000.0 * (t + 1)]), "ttft_ms": results.spread([first + t]),
             "tokens_computed": 1000, "tokens_taken_back": 1000 * t if leg == "on" else 0,
             "prefill_ms": {"computing": first, "KV transfer": float(t)}}
            for t in range(3)
        ],
    } | {"points": []}  # fmt: skip


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_every_number_is_the_files() -> None:
    found = pd()
    reader = read(page([Source("one", found)]))
    expected = {}
    for one in found["points"]:
        for label, told in one["arms"].items():
            numbers = {f"{path}.{key}": value_of(told, path, key) for _, path, key, _ in METRICS}
            expected[one["name"], label] = {where: value for where, value in numbers.items() if value is not None}
    assert reader.rows == expected
    assert reader.rows["1000", "push"]["exposed_ms.of_medians"] == 10.25


def test_it_needs_nothing_from_elsewhere_and_says_what_it_does_not_show() -> None:
    text = page([Source("one", pd())])
    reader = read(text)
    assert reader.fetched == []
    assert "script" not in reader.tags
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    for said in (
        "What this page does not show",
        "Prefix caching was off.",
        "dummies",
        "One prefill and one decode engine",
    ):
        assert said in reader.text


def test_nothing_in_a_file_becomes_markup() -> None:
    found = pd(complaints=[EVIL], skipped=[EVIL])
    found["points"][0]["arms"][EVIL] = arm(1.0)
    found["machine"]["cpu"] = EVIL
    reader = read(page([Source(EVIL, found)], EVIL))
    assert "script" not in reader.tags
    assert ("1000", EVIL) in reader.rows
    assert reader.text.count(EVIL) > 5


def test_arms_of_several_files_stand_beside_each_other() -> None:
    other = pd()
    del other["points"][0]["arms"]["alone"]
    points = merged([Source("one", pd()), Source("two", other)])
    assert list(points) == ["1000", "1000@4", "1000@8"], "without a load first, then by rate"
    assert list(points["1000"]) == ["alone", "push (one)", "push (two)"]


def test_iterations_of_a_sweep_make_one_line_each_and_answers_are_told_apart() -> None:
    sources = []
    for iteration in (1, 2):
        for qps in (1.0, 2.0):
            for output in (16, 128):
                measured = point(f"1000@{qps:g}", {"push": arm(qps * iteration)}, qps=qps) | {"output": output}
                sources.append(Source(f"push_qps{qps:g}_in1000_out{output}_iter{iteration}", pd(points=[measured])))
    points = merged(sources)
    assert list(points) == ["1000@1/16", "1000@2/16", "1000@1/128", "1000@2/128"]
    assert all(list(arms) == ["push (iteration 1)", "push (iteration 2)"] for arms in points.values())
    drawn = re.findall(r"<polyline[^>]*points=\"([^\"]*)\"", page(sources))
    assert [len(line.split()) for line in drawn] == [2] * 8, "two metrics, two lengths of answers, two iterations"


def test_no_two_stages_of_a_request_look_alike() -> None:
    in_push = {
        "router queue": 1,
        "router, until decode's leg": 1,
        "decode's front end": 1,
        "decode queue": 1,
        "registration": 1,
    }
    in_push |= {"prefill computes": 5, "wait for KV": 1, "report": 1, "decode's first token": 1, "the rest": 1}
    in_pull = dict.fromkeys(("router queue", "prefill", "between the legs", "decode's front end", "decode queue"), 1)
    names = [*in_pull, *in_push]
    assert len(set(charts.colours(names).values())) == len(set(names)) == 12


def test_every_chart_is_well_formed_and_shows_what_it_says() -> None:
    text = page([Source("one", pd()), Source("off", turns("off", 9.0)), Source("on", turns("on", 4.0))])
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawn) == 2 + 3 + 2, "over the rate, a waterfall a point, conversations"
    for one in drawn:
        ET.fromstring(one)
    reader = read(text)
    for said in (
        "requests a second",
        "What the first token waited for",
        "Conversations: reuse off and on",
        "KV transfer",
    ):
        assert said in reader.text


def test_a_stacked_bar_is_as_long_as_its_parts() -> None:
    drawn = charts.stacked("t", "ms", {"a": {"x": 10.0, "y": 30.0}, "b": {"x": 20.0}})
    svg = ET.fromstring(drawn[: drawn.index("</svg>") + 6])
    bars = [(float(r.get("x")), float(r.get("width"))) for r in svg.iter("{http://www.w3.org/2000/svg}rect")]
    (x0, w0), (x1, w1), (x2, w2) = bars
    assert x0 == x2
    assert x1 == pytest.approx(x0 + w0, abs=0.1)
    assert w1 == pytest.approx(3 * w0, abs=0.2)
    assert w2 == pytest.approx(2 * w0, abs=0.2)


def test_lines_go_up_with_their_values() -> None:
    drawn = charts.lines("t", "x", "y", {"a": [(2.0, 50.0), (1.0, 0.0)]})
    svg = ET.fromstring(drawn[: drawn.index("</svg>") + 6])
    (line,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    (x0, y0), (x1, y1) = (tuple(map(float, place.split(","))) for place in line.get("points").split())
    assert x0 < x1
    assert y0 > y1
    assert charts.lines("t", "x", "y", {}) == ""
    assert charts.stacked("t", "ms", {}) == ""


@pytest.mark.parametrize(("value", "expected"), [(0, 1), (1, 1), (1.1, 2), (21, 25), (99, 100), (100, 100), (0.3, 0.4)])
def test_axes_end_at_round_numbers(value, expected) -> None:
    assert charts.nice(value) == pytest.approx(expected)


def test_the_command(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text(json.dumps(pd()))
    (tmp_path / "in" / "raw.json").write_text("{}")
    out = tmp_path / "deep" / "report.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "in"), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "passed over" in done.output
    assert ("1000", "push") in read(out.read_text()).rows
    for arguments in (["report", str(tmp_path / "in" / "raw.json")], ["report", str(tmp_path / "deep")]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1


def cut(**lacks):
    """Results of which a point lacks something, or has something else there."""
    found = pd()
    found["points"][0] |= lacks
    return {
        **found,
        "points": [{key: value for key, value in one.items() if value != "gone"} for one in found["points"]],
    }


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(cut(output="gone")), json.dumps(cut(arms=None)), json.dumps(pd(machine=7)),
        json.dumps(cut(arms={"push": arm(40.0, ttft_ms={"median": 10**400})})), "[" * 100_000,
    ],
)  # fmt: skip
def test_a_file_that_was_cut_or_edited_is_named_and_the_others_are_shown(tmp_path, text) -> None:
    (tmp_path / "bad.json").write_text(text)
    (tmp_path / "good.json").write_text(json.dumps(pd()))
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "bad.json"), "-o", str(out)])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.output
    assert "bad.json" in done.output
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "passed over" in done.output
    assert ("1000", "push") in read(out.read_text()).rows


def test_a_page_that_cannot_be_written_is_told(tmp_path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(pd()))
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "good.json" / "report.html")])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert "cannot be written" in done.output


@pytest.mark.slow
def test_a_browser_shows_it_without_an_error(tmp_path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium here")
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page([Source("one", pd()), Source("off", turns("off", 9.0))]))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command = [browser, *options, f"--screenshot={picture}", "--window-size=1200,2000", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 20_000
