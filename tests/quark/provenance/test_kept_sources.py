"""What a run keeps of the code that it was made of."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wide_bounds import FOLDER

import quark
from quark.provenance import sources
from quark_core.artifacts.payload_folder import PayloadFolder
from quark_core.runs.backend_choice import open_reader


def test_the_script_and_the_projects_modules_are_kept_and_no_others(project):
    project.write("pkg/__init__.py", "")
    model = project.write("pkg/model.py", "def forward(x):\n    return 2 * x\n")
    project.write("unused.py", "raise SystemExit\n")
    project.write(".venv/lib/site-packages/other.py", "")
    train = project.write_training(
        "import sys; sys.path.append('.venv/lib/site-packages'); import other, json\n"
        "from pkg import model"
    )
    kept = project.read(project.train())

    assert list(kept) == ["pkg/__init__.py", "pkg/model.py", "train.py"]
    assert kept["pkg/model.py"].text == model.read_text()
    assert kept["train.py"].sha256 == hashlib.sha256(train.read_bytes()).hexdigest()
    assert all(file.is_exact for file in kept.files)
    assert (kept.main, kept.entry, kept.root) == ("train.py", "script", str(project.root))
    digests = open_reader(project.store).load_run(kept.run_id).digests
    assert digests.code == kept.digest


def test_quark_itself_is_no_source_where_it_lies_in_the_project(project):
    checkout = Path(quark.__file__).parents[1]
    for name in ("quark", "quark_backends", "quark_core"):
        (project.root / name).symlink_to(checkout / name)
    project.write("quarks.py", "x = 1\n")
    project.write_training("import quarks")
    kept = project.read(project.train(PYTHONPATH=os.pathsep.join([str(project.root), FOLDER])))
    assert list(kept) == ["quarks.py", "train.py"]


@pytest.mark.long
def test_what_an_earlier_run_has_is_the_same_file_on_the_disk(project):
    project.write("model.py", "x = 1\n")
    project.write_training("import model")
    first, second = project.train(), project.train()
    assert project.list_payloads(first).keys() == project.list_payloads(second).keys()
    assert set(project.list_payloads(second).values()) == {2}
    assert project.read(first).digest == project.read(second).digest


def test_an_edit_is_kept_as_a_small_pack_and_the_rest_is_shared(project):
    project.write("big.py", "".join(f"x{i} = {os.urandom(20).hex()!r}\n" for i in range(2000)))
    project.write("small.py", "y = 1\n")
    project.write_training("import big, small")
    first = project.train()
    project.write("small.py", "y = 2\n")
    second = project.train()
    assert project.read(second)["small.py"].text == "y = 2\n"
    assert project.read(first)["small.py"].text == "y = 1\n"
    assert project.read(second)["big.py"].is_exact
    folder = project.store / ".quark" / "runs" / second / "artifacts" / ".objects"
    own = [f for f in folder.rglob("*") if f.is_file() and f.stat().st_nlink == 1]
    assert sum(file.stat().st_size for file in own) < 5_000


@pytest.mark.long
def test_the_number_of_packs_stays_small_over_many_edits(project):
    project.write("big.py", "".join(f"x{i} = {os.urandom(20).hex()!r}\n" for i in range(500)))
    names = [f"part{i}" for i in range(6)]
    for name in names:
        project.write(f"{name}.py", "y = 0\n")
    project.write_training(f"import big, {', '.join(names)}")
    for edit in range(8):
        project.write(f"{names[edit % 6]}.py", f"y = {edit + 1}\n")
        run_id = project.train()
        kept = project.read(run_id)
        assert kept[f"{names[edit % 6]}.py"].text == f"y = {edit + 1}\n"
        assert all(file.is_exact for file in kept.files)
    assert len(project.list_payloads(run_id)) <= 8


@pytest.mark.long
def test_a_source_goes_with_the_last_run_that_has_it(project):
    project.write_training()
    first, second = project.train(), project.train()
    shutil.rmtree(project.store / ".quark" / "runs" / first)  # as `quark gc` does in the end
    assert project.read(second)["train.py"].is_exact
    assert set(project.list_payloads(second).values()) == {1}
    # The note names runs that are gone: what they had is kept anew.
    shutil.rmtree(project.store / ".quark" / "runs" / second / "artifacts")
    third = project.train()
    assert project.read(third)["train.py"].is_exact


def test_gc_removes_what_only_the_removed_run_had(project):
    project.write_training()
    first = project.train()
    project.write_training("z = 1")
    second = project.train()
    command = shutil.which("quark", path=os.path.dirname(sys.executable))
    for words in (["rm", first, "--yes"], ["gc", "--yes"]):
        subprocess.run(
            [command, *words, "-d", str(project.store)],
            check=True,
            capture_output=True,
        )
    assert not (project.store / ".quark" / "runs" / first).exists()
    assert project.read(second)["train.py"].is_exact


@pytest.mark.long
def test_a_damaged_pack_is_told_and_not_handed_on(project):
    project.write_training()
    first = project.train()
    folder = PayloadFolder(project.store / ".quark" / "runs" / first)
    for sha256 in project.list_payloads(first):
        path = folder.find(sha256)
        if path.read_bytes()[:2] == b"PK":
            path.chmod(0o644)
            path.write_bytes(b"x" * path.stat().st_size)
    damaged = project.read(first)["train.py"]
    assert damaged.text is None
    assert "not the stored one" in damaged.reason
    assert project.read(project.train())["train.py"].is_exact


def test_secrets_are_replaced_and_the_digest_is_of_the_original(project):
    token = "hf_" + "abcdefghij" * 3
    text = f'TOKEN = "{token}"\nrate = 0.1\n'
    project.write("keys.py", text)
    project.write_training("import keys")
    run_id = project.train()
    kept = project.read(run_id)["keys.py"]
    assert kept.text == 'TOKEN = "[redacted]"\nrate = 0.1\n'
    assert kept.reason == sources.REDACTED
    assert kept.sha256 == hashlib.sha256(text.encode()).hexdigest()
    for file in project.store.rglob("*"):
        assert not file.is_file() or token.encode() not in file.read_bytes()


@pytest.mark.long
def test_large_files_and_what_is_beyond_the_budget_are_kept_by_digest(project):
    line = f"x = {'1' * 90!r}\n"
    project.write("large.py", line * 12_000)
    for i in range(23):
        project.write(f"part{i:02}.py", f"n = {i}\n" + line * 9_500)
    # The end waits 2 s for the first look, which is little on a busy machine.
    project.write_training(
        "import large, " + ", ".join(f"part{i:02}" for i in range(23)),
        body="session.open_run.background.join()",
    )
    kept = project.read(project.train())
    assert "larger than 1000000 bytes" in kept["large.py"].reason
    lacking = [file for file in kept.files if file.text is None]
    assert 2 <= len(lacking) <= 4
    assert all(len(file.sha256) == 64 for file in lacking)
    assert any("beyond" in file.reason for file in lacking)


@pytest.mark.parametrize(("mode", "has_text"), [("digest", False), ("keep", True)])
def test_the_setting_says_how_much_is_kept(project, mode, has_text):
    project.write_training()
    kept = project.read(project.train(QUARK_SOURCES=mode))
    assert (kept["train.py"].text is not None) == has_text
    assert len(kept.digest) == 64


def test_nothing_is_kept_where_it_is_switched_off(project):
    project.write_training()
    run_id = project.train(QUARK_SOURCES="off")
    with pytest.raises(quark.ArtifactNotFoundError, match="QUARK_SOURCES=off"):
        project.read(run_id)


def test_a_wrong_word_is_refused_at_the_start(project):
    project.write_training()
    done = project.run("train.py", QUARK_SOURCES="maybe", check=False)
    assert "QUARK_SOURCES must be one of 'keep', 'digest', 'off', got 'maybe'" in done.stderr


@pytest.mark.long
def test_each_attempt_has_sources_of_its_own(project):
    project.write_training()
    run_id = project.train()
    project.write(
        "again.py",
        f"""
        import quark
        store = {str(project.store)!r}
        with quark.resume_run(run_id={run_id!r}, reopen=True, storage_dir=store) as session:
            print(session.run_id)
        """,
    )
    project.run("again.py")
    assert list(project.read(run_id)) == ["again.py"]
    assert list(project.read(run_id, attempt=0)) == ["train.py"]
    assert sources.list_attempts(open_reader(project.store), run_id) == (0, 1)


def test_what_is_imported_late_is_kept_at_the_end(project):
    project.write("late.py", "x = 1\n")
    project.write_training(body="import late")
    assert "late.py" in project.read(project.train())


def test_a_file_that_is_altered_while_it_runs_is_kept_as_it_was_and_told(project):
    project.write("model.py", "x = 1\n")
    project.write_training(
        "import model",
        body="session.open_run.background.join(); open('model.py', 'w').write('x = 22\\n')",
    )
    kept = project.read(project.train())
    assert kept["model.py"].text == "x = 1\n"
    assert kept.changed == ("model.py",)


def test_an_open_run_tells_what_it_has_so_far(project):
    project.write_training(
        body="session.open_run.background.join(); assert 'train.py' in quark.read_sources(session)"
    )
    project.train()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "entry", "paths"),
    [
        (["-m", "pkg.run"], "module", ["pkg/__init__.py", "pkg/run.py"]),
        (
            ["-X", "dev", "-Bc", "import pkg.run", "-m"],
            "command",
            ["command-line.py", "pkg/__init__.py", "pkg/run.py"],
        ),
        (["-"], "stdin", ["pkg/__init__.py", "pkg/run.py"]),
        (["-I", "started.py"], "script", ["pkg/__init__.py", "pkg/run.py", "started.py"]),
    ],
)
def test_every_way_to_begin_a_program(project, arguments, entry, paths):
    project.write("pkg/__init__.py", "")
    project.write_training(path="pkg/run.py")
    source = os.path.dirname(os.path.dirname(quark.__file__))
    project.write(
        "started.py",
        f"import sys; sys.path[:0] = [{str(project.root)!r}, {source!r}]\nimport pkg.run\n",
    )
    kept = project.read(project.train(*arguments, stdin="import pkg.run\n"))
    assert (kept.entry, list(kept)) == (entry, paths)
    assert bool(kept.left_out) == (entry == "stdin")


def test_the_code_of_a_command_line_is_kept_without_its_secrets(project):
    project.write_training(path="run.py")
    token = "hf_" + "abcdefghij" * 3
    kept = project.read(project.train(f"-cTOKEN = '{token}'; import run"))
    assert kept["command-line.py"].text == "TOKEN = '[redacted]'; import run"


def test_a_script_of_another_folder_has_its_own_root(project, tmp_path):
    script = project.write_training()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pyproject.toml").write_text("")
    kept = project.read(project.train(script, cwd=elsewhere))
    assert (kept.root, list(kept)) == (str(project.root), ["train.py"])


def test_packages_from_elsewhere_are_named_as_unknown(project, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "toolbox.py").write_text("")
    project.write_training(
        f"import sys; sys.path.append({str(tmp_path / 'shared')!r})\nimport toolbox"
    )
    assert project.read(project.train()).outside == ("toolbox",)


ODD_MODULES = """
import sys, types, os
class Angry(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(name)
sys.modules["angry"] = Angry("angry")
sys.modules["number"] = 5
sys.modules["none"] = None
for name, file in {
    "nothing": None, "many": ["a"], "gone": "gone.py", "folder": "pkg", "nul": "a\\0.py",
    "secret": ".env", "loop": "loop.py", "device": "/dev/zero", "pipe": "pipe.py",
    "zipped": "code.zip/inner.py", "up": "../up.py",
}.items():
    module = types.ModuleType(name)
    module.__file__ = os.path.join(os.getcwd(), file) if isinstance(file, str) else file
    sys.modules[name] = module
os.mkfifo("pipe.py")
os.symlink("loop.py", "loop.py")
exec(compile("def made(): pass", "<made>", "exec"))
"""


def test_modules_of_any_kind_cost_nothing_but_themselves(project):
    project.write(".env", "PASSWORD=abc\n")
    project.write("pkg/a.py", "")
    project.write_training(ODD_MODULES)
    done = project.run("train.py")
    kept = project.read(done.stdout.split()[-1])
    assert list(kept) == ["train.py"]
    assert {"gone.py", "loop.py", "pipe.py", "code.zip/inner.py", ".env", "pkg"} <= set(
        kept.left_out
    )
    assert "Traceback" not in done.stderr


def test_a_working_directory_that_is_gone_is_no_trouble(project, tmp_path):
    script = project.write_training("import os, shutil", body="shutil.rmtree(os.getcwd())")
    gone = tmp_path / "gone"
    gone.mkdir()
    assert "train.py" in project.read(project.train(script, cwd=gone))


def test_a_folder_with_very_many_files_is_never_walked(project):
    for folder in range(20):
        (project.root / f"data{folder}").mkdir()
        for i in range(500):
            (project.root / f"data{folder}" / f"{i}.py").touch()
    project.write_training()
    assert list(project.read(project.train())) == ["train.py"]


def test_unreadable_files_are_told(project):
    project.write("model.py", "x = 1\n")
    project.write_training("import model, os; os.remove('model.py')")
    kept = project.read(project.train())
    assert list(kept) == ["train.py"]
    assert "cannot be read" in kept.left_out["model.py"]


def test_a_disk_that_takes_no_payload_costs_one_warning(project):
    project.write_training(
        "from quark_core.artifacts import payload_folder\n"
        "def full(*_): raise OSError(28, 'No space left on device')\n"
        "payload_folder._Partial.write = full"
    )
    done = project.run("train.py")
    assert done.stderr.count("could not be stored") == 1
    assert done.stdout.split()
    with pytest.raises(quark.ArtifactNotFoundError, match="No space left on device"):
        project.read(done.stdout.split()[-1])


def test_a_process_that_is_killed_leaves_a_store_that_the_next_one_uses(project):
    project.write("model.py", "x = 1\n" * 10_000)
    project.write_training(
        "import model", body="print('begun', flush=True); import time; time.sleep(60)"
    )
    environ = {**os.environ, "QUARK_SOURCES": "keep"}
    for wait_s in (0.0, 0.02, 0.1):
        child = subprocess.Popen(
            [sys.executable, "train.py"], cwd=project.root, env=environ, stdout=subprocess.PIPE
        )
        assert child.stdout.readline()
        time.sleep(wait_s)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    project.write_training("import model")
    kept = project.read(project.train())
    assert all(file.is_exact for file in kept.files)


def test_forked_children_leave_it_to_their_parent(project):
    project.write_training(
        "import os",
        body="pid = os.fork()\n"
        "if not pid:\n"
        "    quark.MetricsLogger(session).log('child', 1.0, step=0); os._exit(0)\n"
        "os.waitpid(pid, 0)",
    )
    kept = project.read(project.train())
    assert "train.py" in kept


def test_no_list_of_artifacts_shows_them(project):
    project.write_training(
        body="store = quark.ArtifactStore(session); store.log_file('train.py', name='mine')"
    )
    session = quark.open_run(project.train(), project.store)
    store = quark.ArtifactStore(session)
    assert [record.artifact_key for record in store.read()] == ["mine"]
    assert [record.artifact_key for record in store.read(limit=1)] == ["mine"]
    assert len(store.read(artifact_type="kept_sources")) == 3


def test_git_changes_of_a_tree_are_kept(project):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=b", *words],
            cwd=project.root,
            check=True,
            capture_output=True,
        )

    project.write("notes.txt", "old\n")
    project.write_training()
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    clean = project.train()
    assert sources.read_git_changes(open_reader(project.store), clean) is None
    token = "hf_" + "abcdefghij" * 3
    project.write("notes.txt", f"new {token}\n")
    run_id = project.train()
    reader = open_reader(project.store)
    text = sources.read_git_changes(reader, run_id)
    assert "-old\n+new [redacted]\n" in text
    assert reader.load_run(run_id).environment.values["git"]["dirty"] is True


@pytest.mark.long
def test_a_notebooks_cells_are_kept_as_one_document(project):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        "import os; os.environ['QUARK_SOURCES'] = 'keep'; import quark",
        f"session = quark.start_run(project='p', storage_dir={str(project.store)!r})",
        "print('shown'); rate = 0.25",
        "session.end_run(); print(session.run_id)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        book, resources={"metadata": {"path": str(project.root)}}, kernel_name="python3"
    )
    client.execute()
    run_id = "".join(out["text"] for out in book.cells[-1].outputs if "text" in out).split()[-1]
    kept = project.read(run_id)
    assert kept.entry == "notebook"
    text = kept["notebook-cells.py"].text
    assert "# In[3]:\nprint('shown'); rate = 0.25\n" in text
    assert "# In[4]:" in text
    compile(text, "cells", "exec")


SHORT = """
import quark
session = quark.start_run(project="p", storage_dir={store!r})
quark.MetricsLogger(session).log("loss", 1.0, step=0)
print(session.run_id)
"""


def test_the_script_of_a_run_that_ends_with_it_is_kept(project):
    """Python forgets the file of a main script as soon as that has run to its end."""
    project.write("short.py", SHORT.format(store=str(project.store)))
    kept = project.read(project.train("short.py"))
    assert (kept.entry, list(kept)) == ("script", ["short.py"])


def test_code_without_a_file_is_not_said_to_be_the_same(project):
    runs = [
        project.train("-", stdin=f"{SHORT.format(store=str(project.store))}\n# {number}")
        for number in range(2)
    ]
    explained = quark.explain_change(*runs, storage_dir=project.store)
    assert [note.place for note in explained.unknown if note.kind == "code"] == ["<stdin>"]
    assert "code" not in {note.kind for note in explained.ruled_out}
