"""What users log as media is in MLflow as if MLflow's own calls had put it there."""

import json
from importlib.util import find_spec

import pytest

import quark

pytest.importorskip("PIL")
np = pytest.importorskip("numpy")


@pytest.fixture
def begin(tmp_path, server, project):
    def start(options="", **arguments):
        return quark.start_run(
            project=project,
            storage_dir=tmp_path / "root",
            backends=f"mlflow:{server.uri}{options}",
            **arguments,
        )

    return start


@pytest.fixture
def own_uri(mlflow, server):
    """MLflow's own calls go to the server meanwhile."""
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(server.uri)
    yield
    mlflow.set_tracking_uri(before)


def list_shown(list_paths):
    return [path for path in list_paths() if not path.startswith(("quark/", "artifacts/"))]


@pytest.mark.sampled
@pytest.mark.parametrize("options", ["", "?quark=full"])
def test_an_image_is_shown_at_its_step(begin, find_runs, list_paths, fetch, options):
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    with begin(options) as session:
        artifacts = quark.ArtifactStore(session)
        for step in (1, 2):
            artifacts.log_image("val/sample", pixels + step, step=step)
    found = list_shown(list_paths)
    assert len(found) == 4
    for step in (1, 2):
        (full,) = [p for p in found if f"+step+{step}+" in p and p.endswith(".png")]
        (small,) = [p for p in found if f"+step+{step}+" in p and p.endswith("+compressed.webp")]
        assert full.startswith("images/val~sample+step+")
        assert small == full.removesuffix(".png") + "+compressed.webp"
        assert fetch(full)[:4] == b"\x89PNG"
        assert fetch(small)[:4] == b"RIFF"
    (run,) = find_runs()
    assert run.data.tags["mlflow.loggedImages"] == "True"


@pytest.mark.usefixtures("own_uri")
def test_a_table_is_one_of_mlflows(begin, find_runs, client, list_paths):
    pytest.importorskip("pandas")
    with begin() as session:
        quark.ArtifactStore(session).log_table("preds", {"id": [1, 2], "said": ["a", "b"]}, step=3)
    (run,) = find_runs()
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "preds/step-00000003.json", "type": "table"}
    ]
    table = client.load_table(run.info.experiment_id, "preds/step-00000003.json")
    assert table.to_dict("list") == {"id": [1, 2], "said": ["a", "b"]}
    assert list_paths() == ["preds/step-00000003.json"]


def test_images_in_a_table_are_those_of_its_cells(begin, fetch, list_paths):
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    pil = pytest.importorskip("PIL.Image")
    rows = [{"id": 1, "shown": pil.fromarray(pixels)}]
    with begin() as session:
        quark.ArtifactStore(session).log_table("looks", rows)
    table = json.loads(fetch("looks.json"))
    cell = table["data"][0][table["columns"].index("shown")]
    assert cell["type"] == "image"
    assert {cell["filepath"], cell["compressed_filepath"]} <= set(list_paths())


@pytest.mark.long
def test_files_lie_under_their_names(begin, tmp_path, list_paths, fetch):
    (tmp_path / "report.md").write_text("# Report")
    with begin() as session:
        artifacts = quark.ArtifactStore(session)
        artifacts.log_file(tmp_path / "report.md")
        artifacts.log_file(tmp_path / "report.md", name="runs/report.md", step=7)
        artifacts.store("note", "quark/records/x", "said")
        artifacts.log_html("page", "<p>Hello</p>", step=2)
        artifacts.log_histogram("weights", bins=[0, 1, 2], counts=[3, 4])
    found = set(list_paths())
    assert {
        "report.md",
        "runs/report/step-00000007.md",
        "page/step-00000002.html",
        "artifacts/quark/records/x.txt",
        "weights.json",
    } == found
    assert fetch("report.md") == b"# Report"


def test_a_directory_is_a_folder(begin, tmp_path, list_paths):
    place = tmp_path / "data" / "inner"
    place.mkdir(parents=True)
    (place / "b.txt").write_text("b")
    (tmp_path / "data" / "a.bin").write_bytes(b"\x00a")
    with begin() as session:
        quark.ArtifactStore(session).log_directory(tmp_path / "data", name="bundle").wait()
    assert set(list_paths()) == {"bundle/a.bin", "bundle/inner/b.txt"}


@pytest.mark.long
@pytest.mark.usefixtures("own_uri")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_whole_module_is_a_model_of_pytorchs_flavour(begin, tmp_path, find_runs, mlflow):
    import torch

    model = torch.nn.Linear(3, 1)
    torch.save(model, tmp_path / "net.pt")
    with begin() as session:
        quark.ArtifactStore(session).log_file(
            tmp_path / "net.pt", artifact_type="model", metadata={"flavor": "pytorch"}
        )
    (run,) = find_runs()
    loaded = mlflow.pytorch.load_model(f"runs:/{run.info.run_id}/net", weights_only=False)
    assert torch.equal(loaded.weight, model.weight)
    history = json.loads(run.data.tags["mlflow.log-model.history"])
    assert [(one["artifact_path"], set(one["flavors"])) for one in history] == [
        ("net", {"python_function", "pytorch"})
    ]


@pytest.mark.long
@pytest.mark.usefixtures("own_uri")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")
def test_a_directory_that_mlflow_saved_is_a_model(begin, tmp_path, find_runs, mlflow):
    import mlflow.sklearn
    from sklearn.linear_model import LinearRegression

    model = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    mlflow.sklearn.save_model(model, tmp_path / "saved")
    with begin() as session:
        quark.ArtifactStore(session).log_directory(tmp_path / "saved", name="model").wait()
    (run,) = find_runs()
    loaded = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
    assert loaded.predict([[2.0]])[0] == pytest.approx(5.0)
    history = json.loads(run.data.tags["mlflow.log-model.history"])
    assert [one["artifact_path"] for one in history] == ["model"]


def test_samples_are_tables(begin, find_runs, fetch):
    with begin() as session:
        samples = quark.SampleLogger(session, "eval/generations")
        samples.log_many(
            [{"prompt": "p", "completion": "c", "reward": 0.5}, {"prompt": "q", "note": [1]}],
            step=4,
        )
    (run,) = find_runs()
    (told,) = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert told["path"].startswith("eval/generations/step-00000004-")
    assert json.loads(fetch(told["path"])) == {
        "columns": ["prompt", "completion", "reward", "note"],
        "data": [["p", "c", 0.5, None], ["q", None, None, "[1]"]],
    }


def test_a_broken_image_stays_a_file(begin, tmp_path, list_paths):
    with begin() as session:
        quark.ArtifactStore(session).store("image", "odd", b"no image", payload_format="bytes")
    (path,) = list_paths()
    assert path.startswith("odd")
