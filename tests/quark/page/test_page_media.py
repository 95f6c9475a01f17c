"""What the page's server answers of media: ranges, pages in a sandbox, overlays, lineage."""

import json

import numpy as np
import pytest

import quark
from quark.page.routes.records import defuse_html, describe_facts, describe_over, read_range
from quark_core.errors import ArtifactNotFoundError
from quark_core.records import ArtifactRecord

VIDEO = b"\0\0\0\x18ftypmp42" + bytes(range(256)) * 4000
HTML = "<!doctype html><link rel=preconnect href=http://a.example><script>1</script><p>hello"
IMAGE = np.zeros((8, 10, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def media_store(tmp_path_factory):
    root = tmp_path_factory.mktemp("media")
    path = root / "clip.mp4"
    path.write_bytes(VIDEO)
    folder = root / "data"
    folder.mkdir()
    (folder / "one.txt").write_text("one")
    session = quark.start_run(project="p", storage_dir=root, name="maker")
    with session, quark.ArtifactStore(session) as artifacts:
        artifacts.log_video("clip", path).wait(60)
        artifacts.log_html("page", HTML)
        artifacts.log_html("odd", "<b>x")
        artifacts.store("note", "faked", f"{HTML} of somebody else")
        artifacts.log_markdown("notes", "<b>no html</b>\n\n# Title")
        over = {"boxes": [[0, 0, 3, 3]], "masks": np.ones((8, 10), dtype=int)}
        artifacts.log_image("seen", IMAGE, caption="a cat", class_labels=["sky", "cat"], **over)
        artifacts.log_table("table", [[IMAGE, 1]], columns=["image", "n"])
        artifacts.log_directory(folder, aliases=["gold"]).wait(60)
        artifacts.log_audio("sound", [0.0, 0.5], sample_rate_hz=8000)
    user = quark.start_run(project="p", storage_dir=root, name="user")
    with user:
        user.use_artifact("data:gold")
    return root, session.run_id, user.run_id


@pytest.fixture
def page(media_store, look):
    root, run_id, user_id = media_store
    client = look(root)
    client.run_id, client.user_id = run_id, user_id
    client.rows = {
        row["name"]: row for row in client.json(f"/api/runs/{run_id}/artifacts")["artifacts"]
    }
    return client


@pytest.mark.long
def test_each_artifact_says_what_it_is_shown_as(page):
    shown = {name: row["view"] for name, row in page.rows.items()}
    assert shown == {
        "clip": "video", "page": "html", "odd": "html", "faked": None, "notes": "markdown",
        "seen": None, "table": None, "data": "directory", "sound": "audio",
    }  # fmt: skip
    assert page.rows["data"]["facts"] == {"files": 1, "total_bytes": 3}
    assert page.rows["sound"]["facts"]["duration_s"] == 2 / 8000


@pytest.mark.parametrize(
    ("asked", "first", "end"),
    [("bytes=0-9", 0, 10), ("bytes=1000-", 1000, None), ("bytes=-7", -7, None),
     (f"bytes=3-{10**12}", 3, None)],
)  # fmt: skip
def test_a_video_is_served_by_ranges(page, asked, first, end):
    answer = page.http.get(f"/{page.rows['clip']['url']}", headers={"range": asked})
    wanted = VIDEO[first:end]
    assert (answer.status_code, answer.content) == (206, wanted)
    start = first % len(VIDEO) if first < 0 else first
    assert answer.headers["content-range"] == (
        f"bytes {start}-{start + len(wanted) - 1}/{len(VIDEO)}"
    )
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_what_is_no_range_is_all_of_it(page):
    for asked in ("bytes=5-1", "bytes=-", "lines=1-2", "bytes=0-1,4-5", "bytes=a-b"):
        answer = page.http.get(f"/{page.rows['clip']['url']}", headers={"range": asked})
        assert (answer.status_code, len(answer.content)) == (200, len(VIDEO)), asked
    with pytest.raises(ArtifactNotFoundError):
        read_range("bytes=100-", 100)
    with pytest.raises(ArtifactNotFoundError):
        read_range("bytes=-0", 100)


def test_html_is_sent_as_a_page_only_where_it_was_logged_as_one(page):
    answer = page.get(f"/{page.rows['page']['url']}", page="1")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox; default-src 'none'")
    assert answer.headers["x-dns-prefetch-control"] == "off"
    assert b"<x-link" in answer.content
    assert b"<link" not in answer.content
    plain = page.get(f"/{page.rows['page']['url']}")
    assert plain.headers["content-disposition"].startswith("attachment")
    saved = page.get(f"/{page.rows['page']['url']}", page="1", download="1")
    assert saved.headers["content-disposition"].startswith("attachment")
    assert saved.content == HTML.encode()


@pytest.mark.parametrize("name", ["clip", "notes", "sound", "data"])
def test_nothing_else_is_ever_a_page(page, name):
    answer = page.get(f"/{page.rows[name]['url']}", page="1")
    assert not answer.headers["content-type"].startswith("text/html") or (
        answer.headers["content-disposition"].startswith("attachment")
    )


def test_what_loads_by_itself_is_taken_out_of_a_page():
    odd = b"<LINK rel=x><Meta http-equiv=refresh><base href=x></base><IFRAME src=y></iframe>"
    assert defuse_html(odd) == (
        b"<x-LINK rel=x><x-Meta http-equiv=refresh><x-base href=x></x-base>"
        b"<x-IFRAME src=y></x-iframe>"
    )
    assert defuse_html("<link>é".encode("utf-16")) == "<x-link>é".encode()


def test_markdown_is_answered_as_text_whatever_it_begins_with(page):
    row = page.rows["notes"]
    said = page.json(f"/api/runs/{page.run_id}/text", sha256=row["sha256"])
    assert said["text"].startswith("<b>no html</b>")
    faked = page.rows["faked"]["sha256"]
    assert "is not a text" in page.refused(400, f"/api/runs/{page.run_id}/text", sha256=faked)
    answer = page.get(f"/{page.rows['faked']['url']}", page="1")
    assert answer.headers["content-disposition"].startswith("attachment")


def test_pictures_have_what_lies_over_them_and_parts_are_not_listed(page):
    (seen,) = page.json(f"/api/runs/{page.run_id}/images")["images"]
    assert seen["boxes"] == {"boxes": [{"box": [0, 0, 3, 3]}]}
    assert seen["labels"] == {"0": "sky", "1": "cat"}
    assert seen["facts"]["caption"] == "a cat"
    (mask,) = seen["masks"]
    answer = page.get(f"/artifacts/{page.run_id}/{mask['sha256']}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
    masks = page.json(f"/api/runs/{page.run_id}/artifacts", type="image_mask")["artifacts"]
    assert [row["name"] for row in masks] == ["seen"]


def test_a_picture_in_a_table_is_named_by_its_hash(page):
    row = page.rows["table"]
    said = page.json(f"/api/runs/{page.run_id}/table", sha256=row["sha256"], kind="json")
    (cells,) = said["rows"]
    assert page.get(f"/artifacts/{page.run_id}/{cells[0]['image']}").status_code == 200
    assert cells[1] == 1


def test_lineage_is_told_both_ways(page):
    made = page.json(f"/api/runs/{page.run_id}/lineage")
    found = {version["name"]: version for version in made["made"]}
    assert found["data:v0"]["aliases"] == ["gold", "latest"]
    assert found["data:v0"]["used_by"] == [page.user_id]
    assert "seen:v0" in found
    used = page.json(f"/api/runs/{page.user_id}/lineage")
    assert [version["name"] for version in used["used"]] == ["data:v0"]
    assert used["used"][0]["run_id"] == page.run_id
    page.refused(404, "/api/runs/absent/lineage")


@pytest.mark.parametrize(
    "metadata",
    [
        {"boxes": 3, "masks": "x", "class_labels": [1]},
        {"boxes": {"a": [{"box": ["x", 1, 2, 3]}, {"box": [1]}, 3, {"label": 1}]}},
        {"boxes": {"a": {"b": 1}}, "masks": [{"sha256": "../x", "encoding": "L"}, 3]},
        {"masks": [{"sha256": "a" * 64, "encoding": "EVIL"}]},
        {"boxes": {"a": [{"box": [10**400, 1, 2, 3]}]}, "width": 10**400},
    ],
)
def test_metadata_of_somebody_else_is_sent_in_no_other_form(metadata):
    record = ArtifactRecord(
        "r", "w", 0, 0, 0, 0, "image", "i", None, "i", "bytes", 1, "a" * 64,
        metadata=json.loads(json.dumps(metadata)),
    )  # fmt: skip
    over = describe_over(record)
    assert describe_facts(record) == {}
    assert all(boxes == [] for boxes in over["boxes"].values())
    assert (over["masks"], over["labels"]) == ([], {})
