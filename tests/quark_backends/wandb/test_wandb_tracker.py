"""What a tracker's calls come to in W&B's own offline file."""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import quark
from quark_backends.wandb.local_files import WandbState
from quark_backends.wandb.run import note_page

if find_spec("wandb") is None:
    pytest.skip("needs wandb", allow_module_level=True)


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WB_PROJECT", "RANK", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def find_file(mirrored, path):
    """A file of the run, as W&B would upload it."""
    (found,) = [each for one in mirrored.paths for each in one.parent.rglob(path)]
    return found


def find_shown(mirrored, key):
    """The only value of a key that is shown as media."""
    (row,) = [row for row in mirrored.rows if key in row]
    return row


@pytest.mark.long
def test_config_table_and_image_are_in_w_and_b(tmp_path, read_mirror):
    pil = pytest.importorskip("PIL.Image")
    pil.new("RGB", (3, 2), (255, 0, 0)).save(tmp_path / "i.png")
    (tmp_path / "report.md").write_text("# done")
    rows = [[1, "a,b"], [2, None], [2.5, "c"]]
    with quark.setup_tracker(
        "digits", "wandb", config={"lr": 0.1, "seed": 3}, outdir="out", mode="offline", name="n"
    ) as tracker:
        for step in (10, 5):
            tracker.log({"loss": 1.0 / step}, step=step)
        tracker.log_config({"lr": 0.2})
        tracker.log_table("eval/preds", ["id", "text"], rows)
        tracker.log_image("samples", "i.png", caption="first")
        tracker.log_artifacts({"Report": "report.md"})
    mirrored = read_mirror(tracker.session.run_path)
    assert {key: mirrored.config[key] for key in ("lr", "seed")} == {"lr": 0.2, "seed": 3}
    assert sorted(mirrored.points("loss")) == [(5, 0.2), (10, 0.1)]
    row = find_shown(mirrored, "eval/preds")
    assert (row["quark/artifact_step"], row["eval/preds"]["_type"]) == (5, "table-file")
    table = json.loads(find_file(mirrored, row["eval/preds"]["path"]).read_text())
    assert (table["columns"], table["data"]) == (["id", "text"], rows)
    row = find_shown(mirrored, "samples")
    assert (row["samples"]["_type"], row["samples"]["caption"]) == ("image-file", "first")
    image = find_file(mirrored, row["samples"]["path"])
    assert image.suffix == ".png"
    assert image.read_bytes() == (tmp_path / "i.png").read_bytes()
    kinds = {each.name: each.type for each in mirrored.of("artifact") if each.type != "run_table"}
    assert kinds == {"eval.preds": "table", "samples": "image", "Report.report.md": "file"}
    run = tracker.wandb_run
    assert (run.id, run.name, run.project, run.url) == (tracker.run_id, "n", "digits", None)
    assert tracker.get_backend("wandb").run_url is None


@pytest.mark.long
def test_what_w_and_b_cannot_show_is_an_artifact_all_the_same(tmp_path, read_mirror):
    pytest.importorskip("PIL.Image")
    with quark.setup_tracker("digits", "wandb", outdir="out", mode="offline") as tracker:
        store = quark.ArtifactStore(tracker.session)
        store.log_table("large", [[n] for n in range(10_001)], columns=["n"])
        # Only the name of an image.
        (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
        store.log_file(tmp_path / "broken.png", name="broken", artifact_type="image")
        tracker.log({"loss": 1.0}, step=0)
    mirrored = read_mirror(tracker.session.run_path)
    assert {each.name for each in mirrored.of("artifact")} == {"large", "broken"}
    assert not {"large", "broken"} & mirrored.keys
    assert mirrored.points("loss") == [(0, 1)]
    assert mirrored.exit_codes == [0]


@pytest.mark.parametrize(
    ("run", "url", "entity"),
    [
        (
            SimpleNamespace(offline=False, url="https://w.ai/t/p/runs/a?apiKey=1", entity="t"),
            *("https://w.ai/t/p/runs/a", "t"),
        ),
        (SimpleNamespace(offline=False, url=None, entity="t"), "", ""),
        (SimpleNamespace(offline=True, url="https://w.ai/t/p/runs/a", entity="t"), "", ""),
    ],
)
def test_only_a_run_that_is_online_has_a_page(run, url, entity):
    state = WandbState()
    note_page(state, run)
    assert (state.url, state.entity) == (url, entity)
