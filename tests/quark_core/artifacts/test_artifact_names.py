"""Names of artifacts: whatever they are, their files stay in the run's own folder."""

import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from payload_tools import list_scratch

import quark
from quark_core.records.names import MAX_NAME_LENGTH, encode_name

PATHS = (
    "..",
    ".",
    "a/..",
    "../a",
    "a/../b",
    "a/./b",
    "./a",
    "/a",
    "/",
    "//a",
    "a\\b",
    "\\",
    "a\0b",
)


@pytest.mark.parametrize("argument", ["name", "namespace"])
@pytest.mark.parametrize("store", ["artifacts", "strict_artifacts"])
def test_a_name_that_leads_elsewhere_is_refused(request, store, argument):
    artifacts = request.getfixturevalue(store)
    for name in PATHS:
        names = {"name": "n", "namespace": None} | {argument: name}
        with pytest.raises(quark.SchemaValidationError, match=f"^{argument}"):
            artifacts.store("t", payload="x", **names)
        with pytest.raises(quark.SchemaValidationError, match=f"^{argument}"):
            artifacts.log_histogram(bins=[0, 1], counts=[1], **names)
    assert artifacts.read() == ()
    assert not (artifacts._run.context.run_path / "artifacts").exists()


@pytest.mark.parametrize("name", ["", " ", "\t", 5, None, b"n", ["n"], "x" * 251, "ä" * 60])
def test_a_name_that_is_none_is_refused(artifacts, name):
    with pytest.raises(quark.SchemaValidationError, match=r"^name"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        artifacts.store("t", name, "x")
    if name is not None:
        with pytest.raises(quark.SchemaValidationError, match=r"^name"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            artifacts.store("t", "n", "x", namespace=name)
    assert artifacts.read() == ()


def test_name_and_namespace_share_one_bound(artifacts):
    key = "/".join(["n" * 124, "m" * 125])
    assert len(key) == MAX_NAME_LENGTH
    record = artifacts.store("t", "m" * 125, "x", namespace="n" * 124)
    assert record.artifact_key == key
    assert artifacts.load(record) == "x"
    assert artifacts.read(artifact_key=key) == (record,)
    with pytest.raises(quark.SchemaValidationError, match="251 characters"):
        artifacts.store("t", "m" * 126, "x", namespace="n" * 124)


def test_a_single_segment_may_be_as_long_as_a_key(artifacts, session):
    record = artifacts.store("t", "x" * MAX_NAME_LENGTH, "payload", step=1)
    assert (session.run_path / record.payload_relative_path).read_text() == "payload"
    assert (session.run_path / record.metadata_relative_path).is_file()


@pytest.mark.parametrize(
    "artifact_type",
    ["", ".", "..", "a/b", "a\\b", "a b", "ä", ".hidden", "-x", "x" * 101, "a\0", "a\n", 5, None],
)
def test_a_type_outside_its_rule_is_refused(artifacts, artifact_type, tmp_path):
    (tmp_path / "file").write_text("x")
    calls = {
        "artifact_type": [
            lambda: artifacts.store(artifact_type, "n", "x"),
            lambda: artifacts.store_file(artifact_type, "n", tmp_path / "file"),
            lambda: artifacts.log_file(tmp_path / "file", artifact_type=artifact_type),
        ],
        "snapshot_type": [lambda: artifacts.log_snapshot("n", 1, snapshot_type=artifact_type)],
    }
    for argument, stores in calls.items():
        for store in stores:
            with pytest.raises(quark.SchemaValidationError, match=f"^{argument}"):
                store()
    assert artifacts.read() == ()


@pytest.mark.parametrize("artifact_type", ["x" * 100, "A.b-c_9", "0", "con", "a.."])
def test_a_type_within_its_rule_is_taken(artifacts, session, artifact_type):
    record = artifacts.store(artifact_type, "n", "x")
    assert artifacts.read(artifact_type=artifact_type) == (record,)
    place = (session.run_path / record.payload_relative_path).resolve()
    assert place.is_relative_to(session.run_path / "artifacts")
    assert artifacts.load(record) == "x"


@pytest.mark.parametrize(
    "name", ["mean@1", "_x", ".x", "a//b", "a/", "a b/ü", "my model (1).pt", "\u2028", "\ud800"]
)
def test_a_name_outside_the_rule_is_stored_encoded(artifacts, name):
    with pytest.warns(RuntimeWarning, match="reads accept either name") as said:
        record = artifacts.store("t", name, "x")
    assert [warning.filename for warning in said] == [__file__]
    assert record.artifact_key == encode_name(name) != name
    assert artifacts.read(artifact_key=name) == (record,)
    assert artifacts.read(artifact_key=record.artifact_key) == (record,)
    assert artifacts.read(artifact_name=record.artifact_name) == (record,)
    namespace, _, last = name.rpartition("/")
    if last:
        assert artifacts.read(artifact_name=last) == (record,)
    if namespace.strip("/"):
        assert artifacts.read(namespace=namespace) == (record,)
        assert artifacts.read(namespace=record.namespace) == (record,)
    assert artifacts.load(record) == "x"


@pytest.mark.parametrize("name", ["mean@1", "a//b", "ü", "_x", "a/", "mean_x40_1"])
def test_a_strict_run_refuses_what_it_would_have_to_encode(strict_artifacts, name):
    with pytest.raises(quark.SchemaValidationError, match="naming rule"):
        strict_artifacts.store("t", name, "x")
    assert strict_artifacts.store("t", "plain/name", "x").artifact_key == "plain/name"
    assert len(strict_artifacts.read()) == 1


def test_a_name_that_looks_encoded_is_told_from_the_encoded_one(artifacts):
    with pytest.warns(RuntimeWarning):
        odd = artifacts.store("t", "mean@1", "odd")
    with pytest.warns(RuntimeWarning):
        look_alike = artifacts.store("t", "mean_x40_1", "look-alike")
    assert odd.artifact_key == "mean_x40_1"
    assert artifacts.read(artifact_key="mean@1") == (odd,)
    # One asks for its own name, the other for its stored one: neither is left out.
    assert artifacts.read(artifact_key="mean_x40_1") == (odd, look_alike)
    assert artifacts.read(artifact_key=look_alike.artifact_key) == (look_alike,)


TEXT = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(codec=None), max_size=8),
    st.text("./\\\0 ax_-~$\n", max_size=12),
    st.lists(st.sampled_from(["..", ".", "", "a", "x2e_", "_x2f_", "~", "C:", "\u2024."])).map(
        "/".join
    ),
    st.text("ab/", min_size=240, max_size=252),
)
ODD = st.one_of(TEXT, st.none(), st.integers(), st.binary(max_size=3))


@pytest.mark.long
@given(name=ODD, namespace=ODD, step=st.none() | st.integers(0, 2**63 - 1))
@example(name="..", namespace=None, step=None)
@example(name="x_", namespace="x_", step=0)
@example(name="a" * 250, namespace=None, step=2**63 - 1)
def test_any_text_is_refused_or_stays_inside(artifacts, session, name, namespace, step):
    root = (session.run_path / "artifacts").resolve()
    record, refusal = None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            payload = {"of": repr(name)}
            record = artifacts.store("any.type", name, payload, namespace=namespace, step=step)
        except quark.SchemaValidationError as error:
            refusal = str(error)
    if record is None:
        assert refusal.startswith(("name", "namespace"))
        return
    for relative in (record.payload_relative_path, record.metadata_relative_path):
        assert ".." not in relative.split("/")
        place = session.run_path / relative
        assert place.resolve().is_relative_to(root)
        assert place.absolute().is_relative_to(root)
        assert place.is_file()
    original = name if namespace is None else f"{namespace}/{name}"
    assert record in artifacts.read(artifact_key=original)
    assert record in artifacts.read(artifact_key=record.artifact_key)
    assert artifacts.load(record) == {"of": repr(name).encode("utf-8", "replace").decode()}
    assert {path.name for path in session.run_path.iterdir()} <= {"artifacts", "journal"}
    assert {path.name for path in root.iterdir()} <= {".objects", ".partial", "any.type"}
    assert list_scratch(session) == []
