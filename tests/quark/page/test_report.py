"""A report of runs: what it holds, that it is bounded and says so, and that nothing in it runs."""

import base64
import hashlib
import json
import re
import warnings
import zlib
from html.parser import HTMLParser

import pytest
from page_client import log_plain_run

import quark
from quark.page.pack import decode_pack
from quark.page.report import _link
from quark_core.errors import InvalidRunStateError, RunNotFoundError, SchemaValidationError

SCRIPT_BYTES = 350_000
HOSTILE = (
    "</script><script>window.ran=1</script><img src=x onerror=alert(1)> | `x` [a](http://b) $x$"
)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the texts of scripts and styles."""

    def __init__(self, text):
        super().__init__(convert_charrefs=False)
        self.found, self.texts, self.isin = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.isin = tag in ("script", "style")
        if self.isin:
            self.texts.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        self.isin = False

    def handle_data(self, data):
        if self.isin:
            self.texts[-1][2] += data

    def list_texts(self, tag):
        return [(attrs, text) for own, attrs, text in self.texts if own == tag]


def read_data(page):
    """Head and packs of the data in a report."""
    ((_, block),) = [
        each for each in Elements(page).list_texts("script") if each[0].get("id") == "contents"
    ]
    data = zlib.decompress(base64.b64decode(json.loads(block)["deflated"]))
    head, columns = decode_pack(data)
    packs = {name: decode_pack(columns[str(at)].tobytes()) for at, name in enumerate(head["packs"])}
    return head, packs


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two runs, one of which is named by who means harm."""
    folder = tmp_path_factory.mktemp("report")
    log_plain_run(folder, name="first", config={"lr": 0.1, "api_key": "sk-" + "a1B2" * 12})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = quark.start_run(
            project=HOSTILE[:60], storage_dir=folder, name=HOSTILE, tags=["t"],
            config={HOSTILE: HOSTILE}, notes=HOSTILE,
        )  # fmt: skip
        with quark.MetricsLogger(session) as metrics:
            for step in range(120):
                metrics.log("train/loss", 2 * 0.95**step if step < 80 else 1e6 + step, step=step)
                metrics.log(HOSTILE[:50], 1.0, step=step)
        session.add_log(HOSTILE)
        session.end_run()
    return folder


@pytest.fixture(scope="module")
def run_ids(store):
    found = quark.search_runs(storage_dir=store, order_by="created")
    return [each.run_id for each in found]


@pytest.fixture(scope="module")
def made(store, run_ids):
    return quark.report(run_ids, storage_dir=store)


@pytest.fixture(scope="module")
def page(made):
    return made.to_html()


def test_the_policy_lets_in_what_the_report_has_and_nothing_else(page):
    elements = Elements(page)
    (policy,) = [
        attrs["content"]
        for tag, attrs in elements.found
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    said = dict(part.strip().split(" ", 1) for part in policy.split(";"))

    def hash_text(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    scripts = [text for attrs, text in elements.list_texts("script") if "type" not in attrs]
    assert [hash_text(text) for text in scripts] == [said["script-src"]]
    assert [hash_text(text) for _, text in elements.list_texts("style")] == [said["style-src"]]
    assert said["default-src"] == "'none'"
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_nothing_of_a_run_becomes_an_element(page):
    found = Elements(page).found
    assert [tag for tag, _ in found if tag in ("img", "iframe", "object", "link", "base")] == []
    assert len([tag for tag, _ in found if tag == "script"]) == 2
    handlers = [name for _, attrs in found for name in attrs if name.startswith("on")]
    assert handlers == []
    assert not [attrs for _, attrs in found if "src" in attrs or "href" in attrs]
    assert "window.ran=1</script>" not in page


def test_a_report_without_data_is_of_bounded_size():
    script, style = _link()
    assert len(script.encode()) + len(style.encode()) <= SCRIPT_BYTES


def test_only_one_module_knows_the_answers_and_none_knows_a_server():
    script, _ = _link()
    assert script.count("const answers = new Map();") == 1
    assert "fetch(" not in script
    assert "location.href" not in script


def test_it_holds_findings_with_the_curves_that_show_them(page, run_ids):
    head, packs = read_data(page)
    run = head["runs"][1]
    grave = [each for each in run["analysis"]["findings"] if each["severity"] == "critical"]
    assert grave
    for finding in grave:
        shown = [f"{run_ids[1]}/{piece['read']}" for piece in finding["evidence"] if piece["read"]]
        assert any(name in packs for name in shown)
    curves, columns = packs[run["curves"][0]]
    keys = [curve["key"] for curve in curves["curves"]]
    assert "train/loss" in keys
    assert float(columns[f"{keys.index('train/loss')}.mean"].max()) == 1e6 + 119


def test_several_runs_are_compared_with_the_first_and_the_verdicts_stand_there_without_scripts(
    page, made, run_ids
):
    visible = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    assert "against first" in visible
    assert "Verdicts" in visible
    (comparison,) = made.to_dict()["comparisons"]
    assert [comparison[side]["run_id"] for side in ("primary", "reference")] == run_ids[::-1]
    assert "against first" in str(made)


def test_readers_without_scripts_have_findings_and_a_drawing(page):
    visible = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    assert "critical: " in visible
    assert "<svg" in visible
    assert "Contents of this report" not in visible  # that is drawn by the script


def test_secrets_are_redacted_and_config_and_logs_are_left_out_where_asked(store, run_ids, made):
    run = made.to_dict()["runs"][0]
    assert run["config"]["api_key"] == "[redacted]"
    bare = quark.report(run_ids, storage_dir=store, config=False, logs=False)
    for run in bare.to_dict()["runs"]:
        assert (run["config"], run["environment"], run["events"]) == (None, None, [])
        assert (run["run"]["path"], run["run"]["host"], run["run"]["user_command"]) == (None,) * 3
        said = " ".join(run["lacks"])
        assert "--no-config" in said
        assert "--no-logs" in said
    head, _ = read_data(bare.to_html())
    assert str(store) not in json.dumps(head)


@pytest.mark.parametrize("logs", [True, False])
def test_the_traceback_of_a_failed_run_is_among_its_logs(tmp_path, logs):
    secret = "sk-" + "a1B2" * 12

    def fail():
        with quark.start_run(project="p", storage_dir=tmp_path) as session:
            quark.MetricsLogger(session).log("loss", 1.0, step=0)
            raise OSError("api_key=" + secret)

    with pytest.raises(OSError, match="api_key"):
        fail()
    (run_id,) = [found.run_id for found in quark.search_runs(storage_dir=tmp_path)]
    (run,) = quark.report(run_id, storage_dir=tmp_path, logs=logs).to_dict()["runs"]
    assert run["run"]["ending"]["message"] == "OSError: api_key=[redacted]"
    trace = run["run"]["traceback"]
    assert trace is None if not logs else "in fail" in trace
    assert secret not in str(run)


def test_what_another_tool_has_kept_in_the_open_is_redacted(tmp_path):
    secret = "sk-" + "a1B2" * 12
    mirror = tmp_path / "csv"
    session = quark.start_run(
        project="p", storage_dir=tmp_path, backends=f"csv:{mirror}", config={"note": "HERE"},
        notes="HERE",
    )  # fmt: skip
    with quark.MetricsLogger(session) as metrics:
        metrics.log("train/loss", 1.0, step=0)
    session.end_run()
    for path in (mirror / session.run_id).glob("*.json"):
        path.write_text(path.read_text("utf-8").replace("HERE", f"api_key={secret}"), "utf-8")
    made = quark.report(session.run_id, storage_dir=tmp_path, backend=f"csv:{mirror}")
    (run,) = made.to_dict()["runs"]
    assert run["config"]["note"] == "api_key=[redacted]"
    assert run["run"]["notes"] == "api_key=[redacted]"
    head, _ = read_data(made.to_html())
    assert secret not in json.dumps(head)


@pytest.mark.long
def test_ten_thousand_metrics_are_bounded_and_the_report_says_so(tmp_path):
    session = quark.start_run(project="many", storage_dir=tmp_path)
    with quark.MetricsLogger(session) as metrics:
        for step in range(2):
            metrics.log_many({f"layer/m{n}": float(n) for n in range(10_000)}, step=step)
            metrics.log("train/loss", 1.0, step=step)
    session.end_run()
    made = session.report()
    (run,) = made.to_dict()["runs"]
    assert len(run["metrics"]["rows"]) == 60
    assert run["metrics"]["rows"][0][0] == "train/loss"
    assert any("9,941 of 10,001 metrics" in said for said in run["lacks"])
    assert len(made.to_html()) < SCRIPT_BYTES + 200_000


def test_a_running_session_reports_what_it_has_logged_so_far(tmp_path):
    with quark.start_run(project="live", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("train/loss", 2.5, step=0)
        made = session.report()
        assert made.to_dict()["runs"][0]["run"]["state"] == "running"
        assert made.to_dict()["runs"][0]["metrics"]["rows"][0][6] == 2.5
        metrics.log("train/loss", 2.0, step=1)
    assert made.run_ids == (session.run_id,)
    assert repr(made) == f"RunReport({session.run_id})"


def test_a_run_that_is_kept_nowhere_has_no_report(tmp_path):
    with (
        quark.start_run(project="none", storage_dir=tmp_path, backends="none") as session,
        pytest.raises(InvalidRunStateError, match="nothing to report"),
    ):
        session.report()


def test_what_is_no_run_is_refused(store, run_ids):
    with pytest.raises(SchemaValidationError, match="must be a session, a run ID"):
        quark.report([run_ids[0], 3], storage_dir=store)
    with pytest.raises(SchemaValidationError, match="1 to 20 runs"):
        quark.report([], storage_dir=store)
    with pytest.raises(RunNotFoundError):
        quark.report("nobody", storage_dir=store)


def test_markdown_shows_texts_as_they_are(made):
    text = made.to_markdown()
    assert "<script" not in text
    assert "<img" not in text
    assert "](http://" not in text
    assert "http://" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert widths <= {6, 5}  # scores, findings and verdicts: no name has added a cell


def test_it_is_saved_where_asked(made, tmp_path):
    path = made.save(tmp_path / "in" / "report.html")
    assert path.read_text("utf-8") == made.to_html()
